"""The kernels that move, write and compare rows, against their twins."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvfix.core import LayerRotation, Run
from kvfix.ops import Pack, Part, kv_deviation, rotate_keys, scatter_kv
from kvfix.ops.kv_deviation.naive import kv_deviation_naive
from kvfix.ops.rotate_keys.naive import rotate_keys_naive
from kvfix.ops.scatter_kv.naive import scatter_kv_naive
from tests.ops.devices import DEVICE, DTYPES, poisoned, slice_of
from tests.tolerances import DEVIATION, ROTATION

HEADS = 2


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, strided: bool = False) -> torch.Tensor:
    """On the device; strided: a view into a tensor whose other numbers are NaN."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if not strided:
        return rows.to(DEVICE, dtype)
    wide = torch.full((*shape[:-3], shape[-2] + 5, shape[-3], 2 * shape[-1] + 3), torch.nan).to(DEVICE, dtype)
    view = wide.transpose(-2, -3)[..., 2 : 2 + shape[-2], : 2 * shape[-1] : 2]
    return view.copy_(rows)


# ---- rotate_keys


def rotations_of(dim: int, interleaved: bool) -> list[LayerRotation]:
    """All of a head, part of it, one pair, no positions."""
    sets = [tuple(10000.0 ** -(n / half) for n in range(half)) for half in (dim // 2, max(1, dim // 4 - 1), 1)]
    return [*(LayerRotation(freqs, interleaved) for freqs in sets), LayerRotation(())]


# runs of rows with their source rows: an odd number, one row, no turn, far both ways
MOVES = [Run(0, 63, 0, 7, 7), Run(64, 65, 0, 0, -500), Run(65, 70, 0, 90, 0), Run(80, 111, 0, 71, 8000)]


def turned(keys: torch.Tensor, source: torch.Tensor, rotations: list[LayerRotation], gather: bool) -> torch.Tensor:
    """By the twin, a run and a layer at a time."""
    expected = keys.clone()
    for run, (layer, rotation) in product(MOVES, enumerate(rotations)):
        come = (
            source[layer, :, run.row : run.row + run.end - run.start] if gather else keys[layer, :, run.start : run.end]
        )
        deltas = torch.full((run.end - run.start,), run.delta, device=DEVICE)
        inv_freq = torch.tensor(rotation.inv_freq, dtype=torch.float32, device=DEVICE)
        expected[layer, :, run.start : run.end] = rotate_keys_naive(come, deltas, inv_freq, rotation.interleaved)
    return expected


# dtype, dim, interleaved, gathered, strided
ROTATIONS = list(product(DTYPES, [8, 80, 128], [False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("dtype", "dim", "interleaved", "gather", "strided"), slice_of(ROTATIONS, 5), ids=str)
def test_rotation_equals_the_naive_twin(dtype, dim, interleaved, gather, strided):
    rotations = rotations_of(dim, interleaved)
    keys = random_rows(4, HEADS, 120, dim, dtype=dtype, strided=strided)
    source = random_rows(4, HEADS, 120, dim, dtype=dtype, seed=1, strided=strided)
    before, expected = keys.clone(), turned(keys, source, rotations, gather)
    rotate_keys(keys, MOVES, rotations, source=source if gather else None, backend="triton")
    worst = (keys.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert worst <= ROTATION[dtype]
    outside = [63, *range(70, 80), *range(111, 120)]
    assert torch.equal(keys[:, :, outside], before[:, :, outside])
    # what does not turn is moved bit for bit
    assert torch.equal(keys[3], expected[3])
    assert torch.equal(keys[2, ..., 2:], expected[2, ..., 2:])


def test_layers_may_pair_in_different_ways():
    keys = random_rows(4, HEADS, 120, 16)
    half, interleaved = rotations_of(16, False), rotations_of(16, True)
    rotations = [half[0], interleaved[0], half[1], interleaved[3]]
    expected = turned(keys, keys, rotations, gather=False)
    rotate_keys(keys, MOVES, rotations, backend="triton")
    assert (keys - expected).abs().max() <= ROTATION[keys.dtype] * expected.abs().max()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_that_do_not_move_are_not_written(backend):
    keys = torch.full((4, HEADS, 120, 8), torch.nan, device=DEVICE)
    rotate_keys(keys, [Run(0, 120, 0, 0, 0)], rotations_of(8, False), backend=backend)
    rotate_keys(keys, [], rotations_of(8, False), source=keys, backend=backend)
    assert keys.isnan().all()


@pytest.mark.parametrize("gather", [False, True], ids=["in place", "gathered"])
def test_the_torch_path_equals_the_naive_twin(gather):
    rotations = rotations_of(80, True)
    keys, source = random_rows(4, HEADS, 120, 80), random_rows(4, HEADS, 120, 80, seed=1)
    expected = turned(keys, source, rotations, gather)
    rotate_keys(keys, MOVES, rotations, source=source if gather else None, backend="torch")
    assert (keys - expected).abs().max() <= ROTATION[keys.dtype] * expected.abs().max()


# ---- scatter_kv

SLOTS = [torch.tensor([0, 3, 4, 62]), torch.tensor([7]), torch.arange(20, 53)]


def pack_of(dtype: torch.dtype, dim: int, value_dim: int, num_layers: int, strided: bool = False) -> Pack:
    parts = []
    for seed, slots in enumerate(SLOTS):
        tensors = [
            random_rows(num_layers, 3, 63 + seed, d, dtype=dtype, seed=seed, strided=strided) for d in (dim, value_dim)
        ]
        parts.append(Part(*tensors, slots, int(slots[-1]) + 1, slots))
    return Pack(parts)


SCATTERS = list(product(DTYPES, [(64, 64), (80, 24), (1, 128)], [(0, 1), (2, 1), (1, 2)], [False, True]))


@pytest.mark.parametrize(("dtype", "dims", "layers", "strided"), slice_of(SCATTERS, 5), ids=str)
def test_scatter_equals_the_naive_twin(dtype, dims, layers, strided):
    first, num_layers = layers
    num_rows = sum(len(slots) for slots in SLOTS)
    rows = [random_rows(num_layers, 3, num_rows, dim, dtype=dtype, seed=9, strided=strided) for dim in dims]
    pack, expected = (pack_of(dtype, *dims, 3, strided) for _ in range(2))
    scatter_kv(pack, first, *rows, backend="triton")
    scatter_kv_naive(expected, first, *rows)
    for mine, theirs in zip(pack.parts, expected.parts, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


def test_scatter_writes_its_slots_and_no_others():
    """The twin itself, by hand."""
    pack = pack_of(torch.float32, 8, 4, 2)
    before = [part.keys.clone() for part in pack.parts]
    keys, values = random_rows(1, 3, 38, 8, seed=9), random_rows(1, 3, 38, 4, seed=9)
    scatter_kv_naive(pack, 1, keys, values)
    for (part, rows), was in zip(pack, before, strict=True):
        assert torch.equal(part.keys[1][:, part.slots], keys[0, :, rows])
        assert torch.equal(part.values[1][:, part.slots], values[0, :, rows])
        was[1][:, part.slots] = keys[0, :, rows]
        assert torch.equal(part.keys, was)


def test_scatter_refuses_rows_of_another_dtype():
    with pytest.raises(ValueError, match="float16"):
        scatter_kv(
            pack_of(torch.float32, 8, 8, 1), 0, *[random_rows(1, 3, 38, 8, dtype=torch.float16)] * 2, backend="triton"
        )


# ---- kv_deviation

DEVIATIONS = list(product(DTYPES, [1, 63, 111], [(64, 64), (80, 24), (256, 8)], [False, True]))


@pytest.mark.parametrize(("dtype", "num_rows", "dims", "strided"), slice_of(DEVIATIONS, 5), ids=str)
def test_deviation_equals_the_naive_twin(dtype, num_rows, dims, strided):
    pairs = [
        tuple(
            random_rows(3, num_rows, dim, dtype=dtype, seed=seed + dim, strided=strided and seed == 0)
            for seed in (0, 1)
        )
        for dim in dims
    ]
    for given in (pairs, pairs[:1]):
        with poisoned():
            found = kv_deviation(given, backend="triton")
        expected = kv_deviation_naive(given)
        assert found.dtype == torch.float32
        assert ((found - expected).abs() <= DEVIATION * expected).all()


def test_deviation_refuses_states_of_different_shapes():
    with pytest.raises(ValueError, match="shapes"):
        kv_deviation([(torch.zeros(2, 5, 8, device=DEVICE), torch.zeros(2, 6, 8, device=DEVICE))], backend="triton")
