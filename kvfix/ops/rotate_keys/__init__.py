"""Turns post-RoPE keys from the position they were computed at to another one, in place or as they are gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfix.ops.backend import dispatch
from kvfix.ops.rotate_keys.runs import Move, Rotation, rotate_keys_runs

__all__ = ["rotate_keys"]


def rotate_keys(
    keys: torch.Tensor,  # [L, H, N, D], changed in place
    moves: Sequence[Move],
    rotations: Sequence[Rotation],  # one a layer
    *,
    source: torch.Tensor | None = None,  # [L, H, rows, D], of the same dtype
    backend: str | None = None,
) -> None:
    """Turn the rows `[start, end)` of each move by its `delta` positions, in all layers, in fp32, at unit magnitude.

    With a `source` they come from its rows `row` on; else they are turned where they are. Moves do not overlap, and
    `source` shares no memory with `keys`. `backend`: see `kvfix.ops.backend.dispatch`.
    """
    moves = moves if source is not None else [move for move in moves if move.delta]
    if not moves:
        return

    def kernel() -> None:
        from kvfix.ops.rotate_keys.kernel import rotate_keys_kernel

        rotate_keys_kernel(keys, moves, rotations, source)

    if backend is None and source is not None and source.device != keys.device:
        backend = "torch"
    dispatch("rotate_keys", backend, keys, kernel, lambda: rotate_keys_runs(keys, moves, rotations, source))
