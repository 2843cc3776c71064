"""Streaming: however the stored rows reach a pass, it computes the same bits."""

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from kvfix import align
from kvfix.engine import Continuation
from kvfix.engine import engine as engine_module
from kvfix.pipeline import repair, stream
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.plan import EditOptions, compare, plan_repair
from kvfix.pipeline.repair import Patch
from kvfix.pipeline.stream import AheadCache, PassingCache, StoredRows, StreamedCache, streamed
from tests.pipeline.desk import EDITS, TEXT

MODELS = ["llama", "gemma3", "glm-interleaved", "smollm3"]


class FakeLane:
    """A lane whose work is done when it is asked for, and which notes who waited for what."""

    def __init__(self):
        self.marked, self.waited, self.synchronized = [], [], []

    def staging(self, like):
        return torch.full(like.shape, float("nan"), dtype=like.dtype)

    def entered(self):
        return nullcontext()

    def mark(self):
        mark = Mark(len(self.marked), self)
        self.marked.append(mark)
        return mark

    def passed(self, mark):
        self.waited.append(mark.number)


class Mark:
    def __init__(self, number, lane):
        self.number, self.lane = number, lane

    def synchronize(self):
        self.lane.synchronized.append(self.number)


def upfront(stored, token_ids, positions):
    """Every row in its place before the pass begins."""
    cache = align.allocate(stored.snapshot.segments[0], stored.rows, token_ids, 0, "cpu")
    stored.read_all(cache)
    return cache


def ahead(stored, token_ids, positions):
    return AheadCache(stored, token_ids, 0, int(positions[-1]) + 1, FakeLane())


def layerwise(stored, token_ids, positions):
    return StreamedCache(stored, token_ids, 0, int(positions[-1]) + 1)


def passing(stored, token_ids, positions):
    return PassingCache(stored, token_ids, 0, int(positions[-1]) + 1, positions)


def planned(desk, text, **options):
    """What a repair of the head to a text reads: stored rows, token ids, positions."""
    options = EditOptions(strategy="repair", **options)
    change = compare(desk.engine, desk.store, desk.head(), desk.document(text), Clock())
    plan = plan_repair(desk.engine, change, options, Clock())
    rows = change.snapshot.rows.realigned(plan.source())
    return StoredRows(desk.engine, rows, change.snapshot), change.new.token_ids, plan.positions


def computed(make, stored, token_ids, positions):
    with make(stored, token_ids, positions) as cache:
        stored.engine.recompute(cache, positions)
        return cache.taken(positions)


@pytest.fixture(params=[layerwise, passing, ahead])
def make(request):
    return request.param


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["same length", "growing", "shrinking", "several spans", "before the first token"])
def test_the_pass_computes_the_same_bits(desk_of, make, model, name):
    desk = desk_of(model)
    desk.build(TEXT)
    what = planned(desk, EDITS[name], selector="editlocal", k=9)
    cache = upfront(*what)
    desk.engine.recompute(cache, what[2])
    for mine, theirs in zip(computed(make, *what), (cache.keys, cache.values), strict=True):
        assert torch.equal(mine, theirs[:, :, what[2]])


def test_behind_earlier_edits(desk, make):
    """Rows of several patches, some of which have moved since."""
    desk.build(TEXT)
    desk.edit(EDITS["growing"], k=6, verify=False, strategy="repair")
    desk.edit(EDITS["several spans"], k=6, verify=False, strategy="repair")
    what = planned(desk, EDITS["appended"], k=6)
    assert len(what[0].snapshot.segments) > 1
    cache = upfront(*what)
    desk.engine.recompute(cache, what[2])
    for mine, theirs in zip(computed(make, *what), (cache.keys, cache.values), strict=True):
        assert torch.equal(mine, theirs[:, :, what[2]])


@pytest.mark.parametrize("make", [layerwise, ahead])
def test_asked_it_is_the_whole_cache(desk, make):
    desk.build(TEXT)
    what = planned(desk, EDITS["growing"], k=4)
    cache = upfront(*what)
    desk.engine.recompute(cache, what[2])
    with make(*what) as made:
        desk.engine.recompute(made, what[2])
        whole = made.asked(0, None)
    assert torch.equal(whole.keys, cache.keys)
    assert torch.equal(whole.values, cache.values)
    assert np.array_equal(whole.origin, np.arange(len(cache)))


@pytest.mark.parametrize("make", [layerwise, ahead])
def test_asked_without_a_pass(desk, make):
    desk.build(TEXT)
    what = planned(desk, EDITS["growing"], k=4)
    with make(*what) as made:
        whole = made.asked(0, None)
    assert torch.equal(whole.keys, upfront(*what).keys)


@pytest.mark.parametrize("model", MODELS)
def test_questions_get_the_same_answers_where_layers_go_by(desk_of, model):
    """Several of them, behind one another in the room, in one pass and in several."""
    desk = desk_of(model)
    desk.build(TEXT)
    desk.edit(EDITS["shrinking"], k=6, verify=False, strategy="repair")
    stored, ids, positions = planned(desk, EDITS["several spans"], k=6)
    rng = np.random.default_rng(0)
    tried = [Continuation(list(rng.integers(5, 300, 6)), list(rng.integers(5, 300, n))) for n in (1, 3, 2, 4)]
    cache = streamed(stored, ids, positions, 16, whole=True)
    desk.engine.recompute(cache, positions)
    expected = list(desk.engine.answer_logprobs(cache.asked(16, None), tried))
    made = streamed(stored, ids, positions, 16, whole=False)
    desk.engine.recompute(made, positions)
    patch = Patch(positions, stored.rows.row, *made.taken(positions))
    answers = list(desk.engine.answer_logprobs(made.asked(16, patch), tried))
    assert type(made) is PassingCache
    for mine, theirs in zip(answers, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_nothing_behind_the_last_row_is_read(desk, make, monkeypatch):
    desk.build(TEXT)
    what = planned(desk, EDITS["growing"], selector="editlocal", k=2)
    ends, real = set(), align.gather
    monkeypatch.setattr(
        stream.align,
        "gather",
        lambda cache, rows, segments, start, end, layers: (
            ends.add((start, end)) or real(cache, rows, segments, start, end, layers)
        ),
    )
    computed(make, *what)
    assert ends == {(0, what[2][-1] + 1)}
    assert what[2][-1] + 1 < len(what[1])


def test_several_passes_read_once(desk, monkeypatch):
    monkeypatch.setattr(engine_module, "CHUNK_ROWS", 3)
    desk.build(TEXT)
    what = planned(desk, EDITS["growing"], selector="editlocal", k=9)
    read, real = [], StoredRows.read
    monkeypatch.setattr(
        StoredRows, "read", lambda self, cache, layer, *a: read.append(layer) or real(self, cache, layer, *a)
    )
    computed(layerwise, *what)
    assert read == list(range(desk.engine.shape.layers))


class TestLayersThatGoBy:
    def test_they_share_the_memory_of_one(self, desk):
        desk.build(TEXT)
        stored, ids, positions = planned(desk, EDITS["growing"], k=4)
        cache = passing(stored, ids, positions)
        heads, dim = cache.keys.shape[1], cache.keys.shape[3]
        assert cache.keys.untyped_storage().nbytes() == heads * (positions[-1] + 1) * dim * cache.keys.itemsize

    def test_only_the_rows_of_the_pass_are_kept(self, desk):
        desk.build(TEXT)
        stored, ids, positions = planned(desk, EDITS["growing"], k=4)
        cache = passing(stored, ids, positions)
        desk.engine.recompute(cache, positions)
        with pytest.raises(ValueError, match="only the rows"):
            cache.taken(positions[1:])


class TestChoice:
    @pytest.fixture
    def what(self, desk):
        desk.build(TEXT)
        return planned(desk, EDITS["growing"], k=4)

    def test_one_layers_memory_for_one_pass(self, what):
        assert type(streamed(*what, 20, whole=False)) is PassingCache

    def test_all_layers_where_they_are_wanted(self, what):
        cache = streamed(*what, 20, whole=True)
        assert type(cache) is StreamedCache
        assert cache.capacity == len(cache) + 20

    def test_all_layers_where_one_pass_is_not_enough(self, what, monkeypatch):
        monkeypatch.setattr(engine_module, "CHUNK_ROWS", len(what[2]) - 1)
        assert type(streamed(*what, 20, whole=False)) is StreamedCache

    def test_no_rows_at_all(self, what):
        cache = streamed(what[0], what[1], what[2][:0], 0, whole=False)
        what[0].engine.recompute(cache, what[2][:0])
        assert cache.taken(what[2][:0])[0].shape[2] == 0

    @pytest.mark.parametrize(("verify", "taken"), [(False, 2), (True, 0)])
    def test_edits_without_an_oracle_hold_one_layer(self, desk, what, monkeypatch, verify, taken):
        """One for the rows, one for the questions."""
        made, real = [], PassingCache.__init__
        monkeypatch.setattr(PassingCache, "__init__", lambda self, *a: made.append(self) or real(self, *a))
        report = desk.edit(EDITS["same length"], k=4, strategy="repair", verify=verify)
        assert report.quality.probes
        assert len(made) == taken


class TestAhead:
    @pytest.fixture
    def what(self, desk):
        desk.build(TEXT)
        return planned(desk, EDITS["growing"], k=4)

    def test_each_layer_waits_for_its_own_mark(self, what):
        with ahead(*what) as cache:
            what[0].engine.recompute(cache, what[2])
            assert cache._lane.waited == list(range(cache.num_layers))

    def test_pinned_memory_is_used_again_only_when_it_was_copied(self, what):
        with ahead(*what) as cache:
            what[0].engine.recompute(cache, what[2])
            again = cache.num_layers - stream.LAYERS_AHEAD
            assert cache._lane.synchronized == list(range(again))

    def test_what_reading_raises_ends_the_pass(self, what, monkeypatch):
        def broken(*args):
            raise OSError("the disk is gone")

        monkeypatch.setattr(stream.align, "gather", broken)
        with pytest.raises(OSError, match="the disk is gone"), ahead(*what) as cache:
            what[0].engine.recompute(cache, what[2])

    def test_a_pass_that_fails_leaves_nothing_under_way(self, what):
        with pytest.raises(RuntimeError), ahead(*what) as cache:
            raise RuntimeError
        assert all(future.done() for future in cache._coming)
        assert {mark.number for mark in cache._marks.values()} <= set(cache._lane.synchronized)

    def test_questions_where_no_pass_has_asked_for_a_layer(self, desk, what, monkeypatch):
        """Nothing is recomputed, and the rows are read all the same, however slow the disk."""
        made, bring = [], AheadCache._bring
        monkeypatch.setattr(AheadCache, "_bring", lambda self, layer: time.sleep(0.05) or bring(self, layer))

        def read_ahead(stored, ids, rows, room, *, whole):
            made.append(AheadCache(stored, ids, room, int(rows[-1]) + 1 if len(rows) else 0, FakeLane()))
            return made[-1]

        monkeypatch.setattr(repair, "streamed", read_ahead)
        deleted = TEXT.replace(" and keeps one copy", "")
        report = desk.edit(deleted, selector="editlocal", k=0, strategy="repair", verify=False)
        assert len(report.plan.positions) == 0
        assert report.quality.probes
        assert np.array_equal(made[0].origin, np.arange(len(made[0])))
