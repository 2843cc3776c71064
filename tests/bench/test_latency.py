"""bench latency on a tiny model: its grid, its rows, what stands beside each time; no time is looked at."""

import json
from itertools import product

import pytest

from kvfix.bench import latency
from kvfix.bench.latency import Grid, run_latency
from kvfix.bench.roofline import bound
from kvfix.bench.texts import Texts, single_tokens
from kvfix.errors import DocumentError, KVFixError, UsageError
from kvfix.pipeline import measure

pytestmark = pytest.mark.usefixtures("single_words")
SPREAD = {"median", "p20", "p80", "best"}
TIMES = ("full_prefill_ms", "suffix_prefill_ms", "recompute_ms", "end_to_end_ms")
RATIOS = ("speedup_full", "speedup_suffix", "speedup_end_to_end")


@pytest.fixture
def engine(gated):
    return gated("llama")


def test_a_row_for_every_cell_of_the_grid(engine, given_ceilings):
    grid = Grid([50, 80], [3, 6], [1, 2], [0.1, 0.8], rounds=1)
    body = run_latency(engine, grid)
    json.dumps(body, allow_nan=False)
    assert body["schema"] == "kvfix.latency/1"
    assert body["ceilings"]["operations_per_s"] == given_ceilings.operations_per_s
    found = [(row["context"], row["span"], row["edit_at"], row["k"]) for row in body["rows"]]
    wanted = product(grid.contexts, grid.spans, grid.places, grid.ks)
    assert found == [(context, span, int(place * context), k) for context, span, place, k in wanted]
    for row in body["rows"]:
        assert row["recomputed"] == row["span"] + row["k"]
        assert row["max_abs_error_exact"] <= 1e-4
        assert all(set(row[name]) == SPREAD for name in (*TIMES, *RATIOS))


def test_counts_and_ratios_stand_beside_the_times(engine, given_ceilings):
    (row,) = run_latency(engine, Grid([60], [7], [2], [0.5], rounds=1))["rows"]
    assert row["token_ratio"] == 60 / 9
    assert row["suffix_token_ratio"] == 30 / 9
    assert row["ratio_share"] == row["speedup_full"]["median"] / (60 / 9)
    assert row["suffix_ratio_share"] == row["speedup_suffix"]["median"] / (30 / 9)
    from kvfix.bench.counts import Counts

    counts = Counts.of(engine)
    works = {"repair": counts.suffix(30, 39), "full": counts.prefill(60), "suffix": counts.suffix(30, 60)}
    for (name, work), time in zip(works.items(), ("recompute_ms", "full_prefill_ms", "suffix_prefill_ms"), strict=True):
        told = row["roofline"][name]
        assert {key: told[key] for key in work._fields} == work._asdict()
        assert told["bound_ms"] == bound(work, given_ceilings)["bound_ms"]
        assert told["share"] == told["bound_ms"] / row[time]["median"]


def test_full_and_suffix_are_computed_once_a_round_for_all_repairs(engine, given_ceilings, monkeypatch):
    counted = []
    timed = measure.timed_ms
    monkeypatch.setattr(measure, "timed_ms", lambda engine, work: counted.append(work) or timed(engine, work))
    run_latency(engine, Grid([50], [2, 4, 6], [1], [0.2, 0.6], rounds=2))
    assert len(counted) == 3 * (2 + 6 + 2 * 2), "full twice, six repairs, two suffixes twice, in three rounds"


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_no_time_without_equality(engine, given_ceilings, monkeypatch, error):
    monkeypatch.setattr(latency, "exactness", lambda *given: error)
    monkeypatch.setattr(latency, "compare_all", lambda *given: pytest.fail("took times"))
    with pytest.raises(KVFixError, match="no times are reported"):
        run_latency(engine, Grid([50], [2], rounds=1))


def test_a_wrong_recompute_is_seen(engine, monkeypatch):
    texts = Texts(engine, 40)
    fresh = engine.prefill(texts.token_ids)
    stale = engine.prefill(engine.encode(texts.changed(9, 2)).token_ids)
    assert latency.exactness(engine, stale, fresh, 9) <= 1e-4
    monkeypatch.setattr(engine, "recompute", lambda cache, positions: None)
    assert latency.exactness(engine, stale, fresh, 9) > 1e-2


@pytest.mark.parametrize("grid", [Grid([50], [2], [1], [1.0]), Grid([50], [2], [0]), Grid([50], [2], [60])])
def test_edits_without_room_are_refused(grid):
    with pytest.raises(UsageError, match="no room for a span"):
        run_latency(None, grid)


def test_a_k_below_nothing_is_refused():
    with pytest.raises(UsageError, match="expected a number of rows"):
        run_latency(None, Grid([50], [2, -1]))


def test_a_context_beyond_the_model_is_refused_before_anything_is_computed(engine, monkeypatch):
    monkeypatch.setattr(engine, "prefill", lambda *given, **more: pytest.fail("computed"))
    with pytest.raises(DocumentError, match="takes at most 512"):
        run_latency(engine, Grid([50, 600], [2]))


def test_words_are_single_tokens_after_a_space(engine):
    assert list(single_tokens(engine)) == [" a", " the"]


def test_texts_differ_where_they_are_changed_and_nowhere_else(engine):
    texts = Texts(engine, 40)
    changed = engine.encode(texts.changed(5, 3)).token_ids
    assert len(changed) == len(texts.token_ids) == 40
    assert [i for i in range(40) if changed[i] != texts.token_ids[i]] == [5, 6, 7]
    assert Texts(engine, 40).text == texts.text != Texts(engine, 40, seed=1).text
