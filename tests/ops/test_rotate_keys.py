"""Key rotation by runs against one complex rotation a row."""

import pytest
import torch

from kvfix.ops.rotate_keys.naive import rotate_keys_naive
from kvfix.ops.rotate_keys.runs import turn_run
from tests.tolerances import ROTATION

DTYPES = list(ROTATION)


def frequencies(half: int, base: float = 10000.0) -> torch.Tensor:
    return base ** -(torch.arange(half, dtype=torch.float32) / half)


def keys_of(num_rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, num_rows, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(keys: torch.Tensor, delta: int, inv_freq: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """What a turn makes of a copy."""
    copy = keys.clone()
    turn_run(copy, delta, inv_freq, interleaved)
    return copy


def naive(keys: torch.Tensor, delta: int, inv_freq: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    return rotate_keys_naive(keys, torch.full((keys.shape[1],), delta), inv_freq, interleaved)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    worst = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert worst <= ROTATION[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (16, 4), (80, 40), (80, 10), (8, 4), (8, 1)])
@pytest.mark.parametrize(("num_rows", "delta"), [(1, 7), (63, -13), (7, 1), (111, 500), (33, -500)])
def test_equals_the_naive_twin(num_rows, delta, dim, half, interleaved, dtype):
    keys = keys_of(num_rows, dim, dtype)
    assert_near(turned(keys, delta, frequencies(half), interleaved), naive(keys, delta, frequencies(half), interleaved))


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_dims_beyond_the_frequencies_stay_bit_for_bit(interleaved):
    keys = keys_of(9, 16)
    out = turned(keys, 5, frequencies(4), interleaved)
    assert torch.equal(out[..., 8:], keys[..., 8:])
    assert not torch.equal(out[..., :8], keys[..., :8])


@pytest.mark.parametrize(("delta", "half"), [(0, 8), (9, 0)], ids=["no move", "no positions"])
def test_nothing_turns(delta, half):
    keys = keys_of(5, 16, torch.bfloat16)
    assert torch.equal(turned(keys, delta, frequencies(half)), keys)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_works_in_place_on_a_view_of_a_larger_tensor(interleaved, dtype):
    whole = torch.randn(4, 50, 3, 16).to(dtype)
    before = whole.clone()
    view = whole.transpose(1, 2)[1:, :, 10:31]  # [3, 3, 21, 16]: a layer's heads are not contiguous
    for layer in range(3):
        turn_run(view[layer], -3, frequencies(8), interleaved)
        assert_near(view[layer], naive(before.transpose(1, 2)[1 + layer, :, 10:31], -3, frequencies(8), interleaved))
    assert torch.equal(whole[0], before[0])
    assert torch.equal(whole[:, :10], before[:, :10])
    assert torch.equal(whole[:, 31:], before[:, 31:])


def test_half_and_interleaved_are_not_the_same():
    keys = keys_of(5, 16)
    assert (turned(keys, 7, frequencies(8)) - turned(keys, 7, frequencies(8), True)).abs().max() > 0.1


def test_there_and_back():
    keys = keys_of(40, 64)
    back = turned(turned(keys, 123, frequencies(32)), -123, frequencies(32))
    assert (back - keys).abs().max() <= 4 * ROTATION[torch.float32] * keys.abs().max()
