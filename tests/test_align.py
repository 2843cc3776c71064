"""Stored rows into their present order: one gather, and one rotation of every key that has moved."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfix import align
from kvfix.align import allocate, gather, turn, values_at
from kvfix.core import KVCache, LayerRotation, RowMap
from kvfix.ops.rotate_keys.naive import rotate_keys_naive
from kvfix.ops.rotate_keys.runs import turn_run
from tests.tolerances import ROTATION

LAYERS, HEADS, DIM = 3, 2, 8
FREQUENCIES = tuple(float(100.0 ** -(n / 4)) for n in range(4))
# a layer that turns in halves, one that turns in part and interleaved, one without positions
ROTATIONS = [LayerRotation(FREQUENCIES), LayerRotation(FREQUENCIES[:2], interleaved=True), LayerRotation(())]


@dataclass
class Segment:
    keys: torch.Tensor
    values: torch.Tensor


def segment_of(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Segment:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(LAYERS, HEADS, num_rows, DIM, generator=generator)
    return Segment(keys.to(dtype), torch.randn(LAYERS, HEADS, num_rows, DIM + 2, generator=generator).to(dtype))


def aligned(rows: RowMap, segments: list[Segment], room: int = 0, rotations=ROTATIONS) -> KVCache:
    cache = allocate(segments[0], rows, np.arange(len(rows)), room, "cpu")
    gather(cache, rows, segments)
    turn(cache, rows, rotations)
    return cache


def naive(rows: RowMap, segments: list[Segment], rotations=ROTATIONS) -> tuple[torch.Tensor, torch.Tensor]:
    """One row and layer at a time: `[L, H, N, D]` keys and values."""
    num = len(rows)
    dtype = segments[0].keys.dtype
    keys, values = (
        torch.zeros(LAYERS, HEADS, num, DIM, dtype=dtype),
        torch.zeros(LAYERS, HEADS, num, DIM + 2, dtype=dtype),
    )
    for place in range(num):
        if rows.segment[place] < 0:
            continue
        stored, row = segments[rows.segment[place]], int(rows.row[place])
        values[:, :, place] = stored.values[:, :, row]
        for layer, rotation in enumerate(rotations):
            key = stored.keys[layer, :, row : row + 1]
            delta = torch.tensor([place - int(rows.origin[place])])
            turned = rotate_keys_naive(key, delta, torch.tensor(rotation.inv_freq), rotation.interleaved)
            keys[layer, :, place] = (key if delta == 0 else turned)[:, 0]
    return keys, values


@st.composite
def row_maps(draw) -> tuple[RowMap, list[Segment]]:
    """Rows of up to three segments, moved, in runs or apart, some stored nowhere."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    segment, row, origin = [], [], []
    for _ in range(draw(st.integers(1, 8))):
        number = draw(st.integers(-1, len(sizes) - 1))
        length = draw(st.integers(1, 12))
        start = draw(st.integers(0, sizes[number] - 1)) if number >= 0 else 0
        length = min(length, sizes[number] - start) if number >= 0 else length
        place = len(segment)
        moved = draw(st.sampled_from([0, 0, 1, -1, 7, -50, 300]))
        segment += [number] * length
        row += range(start, start + length)
        origin += [at - moved if number >= 0 else at for at in range(place, place + length)]
    rows = RowMap(np.array(segment, np.int32), np.array(row, np.int64), np.array(origin, np.int64))
    return rows, [segment_of(size, seed) for seed, size in enumerate(sizes)]


@given(row_maps(), st.integers(0, 5))
def test_equals_one_row_at_a_time(drawn, room):
    rows, segments = drawn
    cache = aligned(rows, segments, room)
    keys, values = naive(rows, segments)
    assert (cache.keys[:, :, : len(rows)] - keys).abs().max() <= ROTATION[torch.float32] * 5
    assert torch.equal(cache.values[:, :, : len(rows)], values)
    assert np.array_equal(cache.origin, np.arange(len(rows)))
    assert cache.capacity == len(rows) + room
    assert not cache.keys[:, :, len(rows) :].any()


@given(row_maps())
def test_rows_that_have_not_moved_are_the_stored_ones_bit_for_bit(drawn):
    rows, segments = drawn
    cache = aligned(rows, segments)
    for place in np.flatnonzero((rows.origin == np.arange(len(rows))) & (rows.segment >= 0)):
        stored, row = segments[rows.segment[place]], int(rows.row[place])
        assert torch.equal(cache.keys[:, :, place], stored.keys[:, :, row])


@given(row_maps(), st.integers(0, 40), st.integers(0, 40))
def test_parts_make_the_whole(drawn, one, other):
    """A repair first aligns the rows it reads, and the rest when somebody asks."""
    rows, segments = drawn
    first, second = sorted((min(one, len(rows)), min(other, len(rows))))
    cache = allocate(segments[0], rows, np.arange(len(rows)), 0, "cpu")
    for start, end in ((0, first), (first, second), (second, None)):
        gather(cache, rows, segments, start, end)
        turn(cache, rows, ROTATIONS, start, end)
    whole = aligned(rows, segments)
    assert torch.equal(cache.keys, whole.keys)
    assert torch.equal(cache.values, whole.values)
    assert np.array_equal(cache.origin, whole.origin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(dtype):
    segments = [segment_of(40, 0, dtype), segment_of(5, 1, dtype)]
    rows = RowMap.of_base(np.arange(40)).realigned(np.r_[0:10, np.full(5, -1), 10:40])
    rows = rows.overlaid(np.arange(10, 15), 1)
    cache, (keys, values) = aligned(rows, segments), naive(rows, segments)
    assert cache.keys.dtype == dtype
    worst = (cache.keys.float() - keys.float()).abs().max() / keys.float().abs().max()
    assert worst <= ROTATION[dtype]
    assert torch.equal(cache.values, values)
    assert torch.equal(cache.keys[:, :, :10], segments[0].keys[:, :, :10])


def test_fifty_moves_by_one_are_one_move_by_fifty():
    """Keys are turned from where they were computed, not from where they stood last."""
    segments = [segment_of(30, 0, torch.bfloat16)]
    step = RowMap.of_base(np.arange(30))
    for n in range(50):
        step = step.realigned(np.r_[-1, np.arange(30 + n)])
    leap = RowMap.of_base(np.arange(30)).realigned(np.r_[np.full(50, -1), np.arange(30)])
    one, other = aligned(step, segments), aligned(leap, segments)
    assert torch.equal(one.keys, other.keys)
    # turned each time, they would be others
    often = segments[0].keys[0].clone()
    for _ in range(50):
        turn_run(often, 1, torch.tensor(FREQUENCIES))
    assert not torch.equal(often, one.keys[0, :, 50:])


@pytest.mark.parametrize("room", [0, 7])
def test_at_once_is_bit_for_bit_what_gathering_and_turning_give(room):
    """Several segments, moves both ways, rows that are stored nowhere; and keys that stay, with and without turns."""
    segments = [segment_of(20), segment_of(5, 1)]
    stored = RowMap.of_base(np.arange(20)).overlaid(np.array([3, 4, 9, 15, 16]), 1)
    for source in (np.r_[0:6, -1, -1, -1, 6:12, 15:20], np.arange(20), np.r_[-1, np.arange(20)]):
        rows = stored.realigned(source)
        expected = aligned(rows, segments, room)
        found = align.aligned(rows, segments, np.arange(len(rows)), room, "cpu", ROTATIONS)
        assert torch.equal(found.keys, expected.keys)
        assert torch.equal(found.values, expected.values)
        assert np.array_equal(found.origin, expected.origin)


def test_there_and_back_is_no_move():
    segments = [segment_of(30)]
    rows = RowMap.of_base(np.arange(30)).realigned(np.r_[-1, -1, np.arange(30)]).realigned(np.arange(2, 32))
    cache = aligned(rows, segments, rotations=None)
    assert torch.equal(cache.keys, segments[0].keys)


class TestMoves:
    MOVED = RowMap.of_base(np.arange(10)).realigned(np.r_[-1, np.arange(10)])

    def test_of_keys_that_do_not_turn_are_refused(self):
        with pytest.raises(ValueError, match="do not simply turn"):
            aligned(self.MOVED, [segment_of(10)], rotations=None)

    def test_of_rows_that_are_recomputed_do_not_matter(self):
        rows = self.MOVED.realigned(np.full(11, -1))
        assert not aligned(rows, [segment_of(10)], rotations=None).keys.any()

    def test_outside_the_part_do_not_matter(self):
        rows = RowMap.of_base(np.arange(10)).realigned(np.r_[0:5, -1, 5:10])
        segments = [segment_of(10)]
        cache = allocate(segments[0], rows, np.arange(11), 0, "cpu")
        gather(cache, rows, segments, 0, 5)
        turn(cache, rows, None, 0, 5)
        assert torch.equal(cache.keys[:, :, :5], segments[0].keys[:, :, :5])


def test_the_stored_rows_are_left_as_they_are():
    segments = [segment_of(10), segment_of(4, 1)]
    before = [(s.keys.clone(), s.values.clone()) for s in segments]
    rows = RowMap.of_base(np.arange(10)).realigned(np.r_[np.full(4, -1), np.arange(10)]).overlaid(np.arange(4), 1)
    cache = aligned(rows, segments)
    cache.keys.zero_()
    cache.values.zero_()
    for stored, (keys, values) in zip(segments, before, strict=True):
        assert torch.equal(stored.keys, keys)
        assert torch.equal(stored.values, values)


def test_rows_and_tokens_must_agree():
    with pytest.raises(ValueError, match="10 rows but 9 token ids"):
        allocate(segment_of(10), RowMap.of_base(np.arange(10)), np.arange(9), 0, "cpu")


@given(row_maps(), st.randoms(use_true_random=False))
def test_values_at_some_rows(drawn, random):
    rows, segments = drawn
    stored = [at for at in range(len(rows)) if rows.segment[at] >= 0]
    positions = np.array([at for at in stored if random.random() < 0.5], np.int64)
    _, values = naive(rows, segments)
    for layer in range(LAYERS):
        found = values_at(rows, segments, positions, layer)
        assert torch.equal(found, values[layer, :, positions].transpose(0, 1))


class TestRowMap:
    def test_a_base_may_hold_moved_keys(self):
        rows = RowMap.of_base(np.array([0, 1, 5, 6]))
        assert rows.origin.tolist() == [0, 1, 5, 6]
        assert rows.row.tolist() == [0, 1, 2, 3]

    def test_realigned(self):
        rows = RowMap.of_base(np.arange(6)).realigned(np.array([0, 1, -1, 4, 5]))
        assert rows.segment.tolist() == [0, 0, -1, 0, 0]
        assert rows.row[[0, 1, 3, 4]].tolist() == [0, 1, 4, 5]
        assert rows.origin.tolist() == [0, 1, 2, 4, 5]

    def test_overlaid(self):
        rows = RowMap.of_base(np.arange(6)).realigned(np.array([0, 1, -1, 4, 5])).overlaid(np.array([2, 4]), 1)
        assert rows.segment.tolist() == [0, 0, 1, 0, 1]
        assert rows.row.tolist() == [0, 1, 0, 4, 1]
        assert rows.origin.tolist() == [0, 1, 2, 4, 4]

    def test_are_not_changed_in_place(self):
        rows = RowMap.of_base(np.arange(6))
        rows.overlaid(np.array([1]), 3)
        rows.realigned(np.array([-1, 0]))
        assert rows.segment.tolist() == [0] * 6
        assert rows.origin.tolist() == [*range(6)]
