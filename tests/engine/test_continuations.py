"""Text tried behind a document: the figures and tokens are transformers' own, and the document's rows stay."""

import numpy as np
import pytest
import torch

from kvfix.core import KVCache
from kvfix.engine import Continuation, as_transformers_cache
from kvfix.errors import DocumentError
from tests.tolerances import NATS
from tests.zoo import ZOO

NUM_DOCUMENT = 90
QUERIES = [[40, 41, 42], [50], [60, 61, 62, 63, 64, 65, 66]]


def ids_of(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 300, num_tokens)


def cache_of(engine, room: int = 200) -> KVCache:
    """A repaired cache: its rows are nobody's prefill, so nothing can be computed anew behind our back."""
    cache = engine.prefill(ids_of(NUM_DOCUMENT), room=room)
    cache.token_ids[20:24] = [9, 8, 7, 6]
    engine.recompute(cache, np.arange(20, 30))
    return cache


def own_logprobs(engine, cache: KVCache, continuation: Continuation) -> torch.Tensor:
    """Transformers' own log-probabilities `[T, V]` at the answer's positions."""
    query, answer = continuation
    keyword = engine._cache_keyword
    ids = torch.tensor([[*query, *answer]])
    with engine.plain_attention(), torch.inference_mode():
        logits = engine.model(input_ids=ids, use_cache=True, **{keyword: as_transformers_cache(cache)}).logits[0]
    return logits[len(query) - 1 : -1].float().log_softmax(-1)


def own_generate(engine, cache: KVCache, query: list[int], max_new: int) -> list[int]:
    """Transformers' own greedy continuation, without the end mark."""
    ids = torch.tensor([[*cache.token_ids, *query]])
    with engine.plain_attention(), torch.inference_mode():
        out = engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=as_transformers_cache(cache),
            max_new_tokens=max_new,
            do_sample=False,
        )
    new = out[0, ids.shape[1] :].tolist()
    return new[: new.index(1)] if 1 in new else new


@pytest.mark.parametrize("name", ZOO)
def test_logprobs_are_transformers_own(gated, name):
    engine = gated(name)
    cache = cache_of(engine)
    tried = [Continuation(query, ids_of(4, n).tolist()) for n, query in enumerate(QUERIES)]
    for continuation, found in zip(tried, engine.answer_logprobs(cache, tried), strict=True):
        assert found.shape == (4, engine.config.vocab_size)
        assert found.dtype == torch.float32
        assert (found - own_logprobs(engine, cache, continuation)).abs().max() <= NATS


@pytest.mark.parametrize("name", ZOO)
def test_continuations_are_transformers_own(gated, name):
    engine = gated(name)
    cache = cache_of(engine)
    expected = [own_generate(engine, cache, query, 12) for query in QUERIES]
    assert engine.generate(cache, QUERIES, max_new=12) == expected


@pytest.mark.parametrize("name", ["llama", "mistral-window", "smollm3"])
def test_the_queries_matter(gated, name):
    """Random models may repeat one token whatever they are asked; these do not."""
    engine = gated(name)
    assert len(set(map(tuple, engine.generate(cache_of(engine), QUERIES, max_new=12)))) == len(QUERIES)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
class TestRoom:
    @pytest.mark.parametrize("room", [16, 17, 40, 300])
    def test_however_many_texts_share_it(self, gated, name, room):
        engine = gated(name)
        wide, narrow = cache_of(engine), cache_of(engine, room)
        tried = [Continuation(query, [7, 8]) for query in QUERIES * 2]
        pairs = zip(engine.answer_logprobs(narrow, tried), engine.answer_logprobs(wide, tried), strict=True)
        assert all((one - other).abs().max() <= NATS for one, other in pairs)
        assert engine.generate(narrow, QUERIES, max_new=9) == engine.generate(wide, QUERIES, max_new=9)

    def test_leaves_the_documents_rows_bit_for_bit(self, gated, name):
        engine = gated(name)
        cache = cache_of(engine)
        keys, values = (t[:, :, :NUM_DOCUMENT].clone() for t in (cache.keys, cache.values))
        ids, origin = cache.token_ids.copy(), cache.origin.copy()
        engine.generate(cache, QUERIES, max_new=9)
        list(engine.answer_logprobs(cache, [Continuation(query, [7, 8]) for query in QUERIES]))
        assert torch.equal(cache.keys[:, :, :NUM_DOCUMENT], keys)
        assert torch.equal(cache.values[:, :, :NUM_DOCUMENT], values)
        assert np.array_equal(cache.token_ids, ids)
        assert np.array_equal(cache.origin, origin)

    def test_what_was_tried_before_leaves_no_trace(self, gated, name):
        engine = gated(name)
        used, unused = cache_of(engine), cache_of(engine)
        engine.generate(used, [ids_of(50, 3).tolist()] * 2, max_new=20)
        assert engine.generate(used, QUERIES, max_new=9) == engine.generate(unused, QUERIES, max_new=9)

    def test_too_little_for_one_text(self, gated, name):
        engine = gated(name)
        cache = cache_of(engine, 10)
        with pytest.raises(DocumentError, match="12 tokens; the room behind the document is 10"):
            engine.generate(cache, [[5] * 3], max_new=9)
        with pytest.raises(DocumentError, match="11 tokens"):
            list(engine.answer_logprobs(cache, [Continuation([5] * 3, [6] * 8)]))

    def test_beyond_the_context(self, gated, name):
        engine = gated(name)
        cache = engine.prefill(ids_of(500), room=40)
        assert len(engine.generate(cache, [[5] * 3], max_new=9)) == 1
        with pytest.raises(DocumentError, match="500 tokens of document and 13 of question and answer exceed the 512"):
            engine.generate(cache, [[5] * 4], max_new=9)


def caches_of(engine, room: int) -> list[KVCache]:
    """Documents of different lengths and tokens."""
    return [engine.prefill(ids_of(length, length), room=room) for length in (90, 20, 61)]


@pytest.mark.parametrize("pass_rows", [8, 30, 512])
@pytest.mark.parametrize("room", [16, 40, 300])
@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3"])
def test_several_documents_at_once_equal_one_by_one(gated, monkeypatch, name, room, pass_rows):
    engine = gated(name)
    caches = caches_of(engine, room)
    pairs = [(cache, query) for query in QUERIES for cache in caches]
    jobs = [(cache, Continuation(query, ids_of(3, n).tolist())) for n, (cache, query) in enumerate(pairs)]
    alone = [next(engine.answer_logprobs(cache, [tried])) for cache, tried in jobs]
    continued = [engine.generate(cache, [query], max_new=9)[0] for cache, query in pairs]
    monkeypatch.setattr("kvfix.engine.continuations.PASS_ROWS", pass_rows)
    together = list(engine.answer_logprobs_of(jobs))
    assert all((one - other).abs().max() <= NATS for one, other in zip(together, alone, strict=True))
    assert engine.generate_of(pairs, max_new=9) == continued


def test_a_pass_holds_no_more_rows_than_it_may(gated, monkeypatch):
    engine = gated("llama")
    passes = []
    real = engine.logits
    monkeypatch.setattr(engine, "logits", lambda groups, rows: passes.append(groups) or real(groups, rows))
    monkeypatch.setattr("kvfix.engine.continuations.PASS_ROWS", 10)
    caches = caches_of(engine, 100)
    list(
        engine.answer_logprobs_of(
            [(cache, Continuation([5] * length, [6])) for cache, length in zip(caches, (4, 4, 20), strict=True)]
        )
    )
    assert [sum(len(rows) for rows in groups) for groups in passes] == [8, 20]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "smollm3"])
@pytest.mark.parametrize("lengths", [(1, 1), (4, 2), (2, 1, 5), (1, 3)])
def test_answers_to_one_query_do_not_see_each_other(gated, name, lengths):
    engine = gated(name)
    tried = [Continuation(QUERIES[0], ids_of(length, n).tolist()) for n, length in enumerate(lengths)]
    alone = [next(engine.answer_logprobs(cache_of(engine), [one])) for one in tried]
    together = list(engine.answer_logprobs(cache_of(engine), tried))
    assert [len(one) for one in together] == list(lengths)
    assert all((one - other).abs().max() <= NATS for one, other in zip(together, alone, strict=True))


def test_a_query_is_computed_once_for_all_its_answers(gated, monkeypatch):
    engine = gated("llama")
    passes, real = [], engine.logits
    monkeypatch.setattr(engine, "logits", lambda groups, rows: passes.append(groups) or real(groups, rows))
    tried = [Continuation([5] * 9, answer) for answer in ([6, 7, 8], [9])]
    list(engine.answer_logprobs(cache_of(engine), [*tried, Continuation([5] * 4, [6])]))
    assert [sum(map(len, groups)) for groups in passes] == [9 + 2 + 0 + 4]
    narrow = cache_of(engine, 12)
    passes.clear()
    list(engine.answer_logprobs(narrow, tried))
    assert [sum(map(len, groups)) for groups in passes] == [9 + 2, 9]


def test_texts_on_both_sides_of_longropes_limit(gated):
    """The longest text of a call decides the frequencies of all of them."""
    engine = gated("llama-longrope")
    jobs = [
        (engine.prefill(ids_of(length, length), room=60), Continuation([5, 6, 7], [8, 9])) for length in (100, 300, 120)
    ]
    alone = [next(engine.answer_logprobs(cache, [tried])) for cache, tried in jobs]
    together = list(engine.answer_logprobs_of(jobs))
    assert all((one - other).abs().max() <= NATS for one, other in zip(together, alone, strict=True))


def test_nothing_to_try(gated):
    engine = gated("llama")
    cache = cache_of(engine)
    assert list(engine.answer_logprobs(cache, [])) == []
    assert engine.generate(cache, []) == []


def test_an_answer_is_scored_from_its_first_token_on(gated):
    """The first answer token's likelihood is read at the last query token, or at none."""
    engine = gated("llama")
    cache = cache_of(engine)
    short, long = (next(engine.answer_logprobs(cache, [Continuation([5, 6], ids)])) for ids in ([9], [9, 10, 11]))
    assert short.shape[0] == 1
    assert (long[:1] - short).abs().max() <= NATS


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_continuation_ends_before_the_end_mark(gated, monkeypatch, place):
    engine = gated("llama")
    cache = cache_of(engine)
    whole = engine.generate(cache, QUERIES, max_new=8)
    monkeypatch.setitem(engine.__dict__, "stop_ids", {whole[0][place]})
    expected = [ids[: ids.index(whole[0][place])] if whole[0][place] in ids else ids for ids in whole]
    assert engine.generate(cache, QUERIES, max_new=8) == expected


def test_the_end_marks_are_the_generation_configs(gated, monkeypatch):
    engine = gated("llama")
    assert engine.stop_ids == {1}
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [1, 77])
    monkeypatch.delitem(engine.__dict__, "stop_ids")
    assert engine.stop_ids == {1, 77}
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", None)
    monkeypatch.delitem(engine.__dict__, "stop_ids")
    assert engine.stop_ids == {1}


class TestTransformersCache:
    def test_is_a_copy(self, gated):
        cache = cache_of(gated("llama"))
        one, other = as_transformers_cache(cache), as_transformers_cache(cache)
        one.layers[0].keys.zero_()
        assert other.layers[0].keys.abs().max() > 0
        assert cache.keys[0, :, :NUM_DOCUMENT].abs().max() > 0
        assert other.get_seq_length() == NUM_DOCUMENT

    @pytest.mark.parametrize("end", [1, 40, NUM_DOCUMENT])
    def test_may_end_early(self, gated, end):
        cache = cache_of(gated("llama"))
        copy = as_transformers_cache(cache, end)
        assert copy.get_seq_length() == end
        assert torch.equal(copy.layers[2].values[0], cache.values[2, :, :end])
