"""The obvious twin: one complex rotation a row, in fp64."""

from __future__ import annotations

import torch


def rotate_keys_naive(
    keys: torch.Tensor,  # [H, N, D]
    deltas: torch.Tensor,  # [N] positions to move by
    inv_freq: torch.Tensor,  # [R]; the first 2R dims of a head turn
    interleaved: bool,
) -> torch.Tensor:
    """Keys `[H, N, D]` moved by `deltas`, unit magnitude."""
    half = len(inv_freq)
    turned = keys.double().clone()
    if half == 0:
        return turned.to(keys.dtype)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    pairs = torch.complex(turned[..., first], turned[..., second])
    angles = deltas.double()[:, None] * inv_freq.double()
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    turned[..., first], turned[..., second] = pairs.real, pairs.imag
    return turned.to(keys.dtype)
