"""Evidence against the model's own eager attention weights and against whole prefills; the rows asked about stay."""

import numpy as np
import pytest
import torch

from kvfix.bench.caches import copied
from kvfix.core import EditSpan, TokenDiff
from kvfix.diff import diff_tokens
from kvfix.engine import Engine, StaleEvidence, as_transformers_cache
from kvfix.engine.attention import NAME
from kvfix.errors import DocumentError, UsageError
from tests.engine.stale import EDITS, NUM_OLD, Stale, changed, ids_of, stale_of, values_of
from tests.tolerances import EVIDENCE, EVIDENCE_HALF

MODELS = ["llama", "gemma2", "gemma3", "qwen3", "gpt-oss"]
QUERY = tuple(ids_of(7, 3).tolist())
LONG_QUERY = tuple(ids_of(70, 4).tolist())  # longer than the windows: its end sees nothing of the document in them


def evidence_of(engine: Engine, stale: Stale) -> StaleEvidence:
    return StaleEvidence(engine, stale.cache, stale.diff, stale.stored)


def test_query_contrast_is_against_a_neutral_question(gated):
    engine = gated("llama")
    stale = stale_of(engine, "several spans", room=200)
    evidence = evidence_of(engine, stale)
    found = evidence.query_contrast(QUERY)
    asked, anyway = evidence.query_attention(QUERY), evidence.query_attention(engine.text.neutral_ids)
    seen = stale.old_rows >= 0
    assert np.array_equal(found[seen], np.log(asked[seen] / anyway[seen]))
    assert not found[~seen].any()
    assert not evidence.query_contrast(engine.text.neutral_ids).any()


# ---- query attention


def attention_by_hand(engine: Engine, stale: Stale, query: tuple[int, ...]) -> np.ndarray:
    """The model's own eager weights, cut to the document's keys and made to add up to 1 again."""
    num_rows = len(stale.cache)
    mask = torch.ones(1, num_rows + len(query), dtype=torch.int64)
    mask[0, :num_rows][torch.from_numpy(stale.old_rows < 0)] = 0
    engine.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            weights = engine.model(
                input_ids=torch.tensor([query]),
                position_ids=torch.arange(num_rows, num_rows + len(query))[None],
                attention_mask=mask,
                output_attentions=True,
                use_cache=True,
                **{engine._cache_keyword: as_transformers_cache(stale.cache)},
            ).attentions
    finally:
        engine.model.set_attn_implementation(NAME)
    of_context = torch.stack([layer[0, :, :, :num_rows].float() for layer in weights])
    share = of_context.sum(-1, keepdim=True)
    return torch.where(share > 0, of_context / share, 0).mean((0, 1, 2)).numpy()


@pytest.mark.parametrize("query", [QUERY, LONG_QUERY, QUERY[:1]], ids=["short", "long", "one token"])
@pytest.mark.parametrize("edit", ["same length", "several spans", "a deletion", "the first token", "appended"])
@pytest.mark.parametrize("name", MODELS)
def test_query_attention_is_the_models_own(gated, name, edit, query):
    engine = gated(name)
    stale = stale_of(engine, edit)
    found = evidence_of(engine, stale).query_attention(query)
    expected = attention_by_hand(engine, stale, query)
    assert found.shape == (len(stale.cache),)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= EVIDENCE * expected.max()


def test_only_rows_with_a_state_are_looked_at(gated):
    engine = gated("llama")
    stale = stale_of(engine, "several spans")
    before = evidence_of(engine, stale).query_attention(QUERY)
    missing = torch.from_numpy(stale.old_rows < 0)
    assert missing.sum() == 6
    assert (before[missing] == 0).all()
    assert before.sum() == pytest.approx(1, abs=1e-5)
    for tensor in (stale.cache.keys, stale.cache.values):
        tensor[:, :, : len(missing)][:, :, missing] = 99.0
    assert np.array_equal(evidence_of(engine, stale).query_attention(QUERY), before)


def test_an_edit_that_leaves_nothing(gated):
    engine = gated("llama")
    stale = stale_of(engine, "growing")
    num_rows = len(stale.cache)
    diff = TokenDiff((EditSpan(0, 5, 0, num_rows),), 5, np.full(num_rows, -1))
    evidence = StaleEvidence(engine, stale.cache, diff, stale.stored)
    assert not evidence.query_attention(QUERY).any()
    assert not evidence.deviation(1).any()
    assert not evidence.kinship(1).any()


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_however_many_rows_a_block_has(gated, monkeypatch, rows):
    engine = gated("gemma3")
    stale = stale_of(engine, "growing")
    expected = attention_by_hand(engine, stale, QUERY)
    monkeypatch.setattr("kvfix.engine.evidence.BLOCK_ROWS", rows)
    found = evidence_of(engine, stale).query_attention(QUERY)
    assert np.abs(found - expected).max() <= EVIDENCE * expected.max()


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_half_precision(gated, name):
    """Scores are added up in fp32 whatever the model computes in."""
    engine = gated(name, dtype="bfloat16")
    stale = stale_of(engine, "same length")
    found = evidence_of(engine, stale).query_attention(QUERY)
    assert found.dtype == np.float32
    expected = attention_by_hand(engine, stale, QUERY)
    assert np.abs(found - expected).max() <= EVIDENCE_HALF * expected.max()


def test_a_query_without_room(gated):
    engine = gated("llama")
    with pytest.raises(DocumentError, match="a question of 7 tokens; the room behind the document is 6"):
        evidence_of(engine, stale_of(engine, "growing", room=6)).query_attention(QUERY)
    with pytest.raises(DocumentError, match="exceed the 512"):
        evidence_of(engine, stale_of(engine, "growing", room=600)).query_attention((5,) * 500)


# ---- deviation


def deviation_by_hand(engine: Engine, stale: Stale, layer: int, of: str) -> np.ndarray:
    """Every layer of every row computed anew, compared row by row."""
    fresh = engine.prefill(stale.cache.token_ids)
    found = np.zeros(len(fresh))
    for row in np.flatnonzero(stale.old_rows >= 0):
        for part in ("keys", "values") if of == "both" else (of,):
            one, other = (getattr(cache, part)[layer, :, row] for cache in (fresh, stale.cache))
            found[row] += float((one - other).square().sum())
    return found


@pytest.mark.parametrize("of", ["keys", "values", "both"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_deviation_is_that_of_a_whole_prefill(gated, name, edit, layer, of):
    engine = gated(name)
    stale = stale_of(engine, edit)
    found = evidence_of(engine, stale).deviation(layer, of)
    expected = deviation_by_hand(engine, stale, layer, of)
    assert found.shape == (len(stale.cache),)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= EVIDENCE * max(1.0, expected.max())
    assert not found[: stale.diff.first].any()
    assert not found[stale.old_rows < 0].any()


@pytest.mark.parametrize(("edit", "rows"), [("same length", [30, 31, 32]), ("near the end", [86])])
@pytest.mark.parametrize("name", MODELS)
def test_at_the_first_layer_no_unmoved_row_deviates(gated, name, edit, rows):
    """Passes over few rows round in their own way."""
    engine = gated(name)
    stale = stale_of(engine, edit)
    found = evidence_of(engine, stale).deviation(0)
    assert np.flatnonzero(found).tolist() == rows
    assert evidence_of(engine, stale).deviation(1)[rows[-1] + 1 : rows[0] + 40].all()


def test_in_chunks(gated, monkeypatch):
    engine = gated("llama")
    evidence = evidence_of(engine, stale_of(engine, "several spans"))
    expected = evidence.deviation(1)
    monkeypatch.setattr("kvfix.engine.evidence.CHUNK_ROWS", 7)
    assert np.abs(evidence.deviation(1) - expected).max() <= EVIDENCE * expected.max()


def test_beyond_longropes_limit_all_rows_share_one_call(gated, monkeypatch):
    engine = gated("llama-longrope")
    ids = ids_of(300)
    cache = engine.prefill(ids)
    monkeypatch.setattr("kvfix.engine.evidence.CHUNK_ROWS", 7)
    diff = TokenDiff((EditSpan(10, 11, 10, 11),), 300, np.where(np.arange(300) == 10, -1, np.arange(300)))
    assert StaleEvidence(engine, cache, diff, values_of(cache)).deviation(2).max() <= EVIDENCE


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_no_higher_layer_is_computed(gated, monkeypatch, layer):
    engine = gated("llama")
    evidence = evidence_of(engine, stale_of(engine, "growing"))
    run = []
    for index, block in enumerate(engine._decoder.layers):
        real = block.self_attn.forward
        monkeypatch.setattr(
            block.self_attn, "forward", lambda *a, index=index, real=real, **k: run.append(index) or real(*a, **k)
        )
    evidence.deviation(layer)
    assert run == [*range(layer + 1)]


@pytest.mark.parametrize(("layer", "of"), [(3, "both"), (-1, "both"), (1, "queries")])
def test_what_cannot_deviate(gated, layer, of):
    engine = gated("llama")
    with pytest.raises(UsageError, match="there are of: keys, values, both; layer: 0 to 2"):
        evidence_of(engine, stale_of(engine, "growing")).deviation(layer, of)


# ---- kinship


def kinship_by_hand(engine: Engine, stale: Stale, layer: int) -> np.ndarray:
    """Row by row: the edited rows computed among the stale ones, and those that they replaced."""
    repaired, diff = copied(stale.cache), stale.diff
    put_in = np.flatnonzero(diff.source < 0)
    engine.recompute(repaired, put_in)
    old = engine.prefill(ids_of(NUM_OLD))
    kept = np.flatnonzero(stale.old_rows >= 0)
    rows = {row: stale.cache.values[layer, :, row].flatten() for row in kept}
    mean = torch.stack(list(rows.values())).mean(0)
    edited = [repaired.values[layer, :, row].flatten() - mean for row in put_in]
    for span in diff.spans:
        edited += [old.values[layer, :, row].flatten() - mean for row in range(span.old_start, span.old_end)]
    found = np.zeros(len(stale.cache))
    for row, value in rows.items():
        found[row] = max(float(torch.cosine_similarity(value - mean, one, dim=0)) for one in edited)
    return found


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_kinship_is_to_what_was_put_in_or_taken_out(gated, name, edit, layer):
    engine = gated(name)
    stale = stale_of(engine, edit)
    found = evidence_of(engine, stale).kinship(layer)
    assert found.dtype == np.float32
    assert np.abs(found - kinship_by_hand(engine, stale, layer)).max() <= EVIDENCE


def test_kinship_in_a_model_with_fewer_layers_is_that_of_its_last(gated):
    engine = gated("llama")
    evidence = evidence_of(engine, stale_of(engine, "several spans"))
    assert np.array_equal(evidence.kinship(30), evidence.kinship(2))


def test_kinship_costs_the_spans_rows_through_the_lower_layers(gated, monkeypatch):
    engine = gated("llama")
    stale = stale_of(engine, "several spans")
    evidence = evidence_of(engine, stale)
    run = []
    for index, block in enumerate(engine._decoder.layers):
        real = block.input_layernorm.forward
        monkeypatch.setattr(
            block.input_layernorm,
            "forward",
            lambda rows, index=index, real=real: run.append((index, rows.shape[1])) or real(rows),
        )
    evidence.kinship(1)
    assert run == [(0, stale.diff.num_span), (1, stale.diff.num_span)]


# ---- the rows asked about


@pytest.mark.parametrize("name", MODELS)
def test_the_rows_stay_bit_for_bit(gated, name):
    engine = gated(name)
    stale = stale_of(engine, "several spans")
    cache, num_rows = stale.cache, len(stale.cache)
    keys, values = (t[:, :, :num_rows].clone() for t in (cache.keys, cache.values))
    ids, origin = cache.token_ids.copy(), cache.origin.copy()
    evidence = evidence_of(engine, stale)
    first = evidence.query_attention(QUERY)
    evidence.deviation(1)
    evidence.kinship(1)
    evidence.query_attention(LONG_QUERY)
    assert torch.equal(cache.keys[:, :, :num_rows], keys)
    assert torch.equal(cache.values[:, :, :num_rows], values)
    assert np.array_equal(cache.token_ids, ids)
    assert np.array_equal(cache.origin, origin)
    assert np.array_equal(evidence.query_attention(QUERY), first)


@pytest.mark.parametrize("edit", EDITS)
def test_which_old_rows_stand_where(edit):
    diff = diff_tokens(ids_of(NUM_OLD), changed(*EDITS[edit]))
    expected = diff.source.tolist()
    for span in diff.spans:
        for step in range(span.num_new if span.num_new == span.num_old else 0):
            expected[span.new_start + step] = span.old_start + step
    assert diff.stale_source().tolist() == expected
