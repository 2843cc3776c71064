"""Stored rows into a cache in their present order: one gather, and one rotation of every key that has moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvfix.core import KVCache, LayerRotation, RowMap


class Rows(Protocol):
    """A stored segment's tensors."""

    keys: torch.Tensor  # [L, H, M, D]
    values: torch.Tensor  # [L, H, M, Dv]


class Run(NamedTuple):
    """Consecutive rows that come from consecutive rows of one segment and move by one delta."""

    start: int  # in the new order
    end: int
    segment: int  # -1: stored nowhere
    row: int  # the segment's row of `start`
    delta: int  # positions the keys move by


def runs(rows: RowMap) -> Iterator[Run]:
    """The runs of a row map, in order."""
    import numpy as np

    if len(rows) == 0:
        return
    delta = np.arange(len(rows)) - rows.origin
    breaks = (
        (np.diff(rows.segment) != 0) | (np.diff(delta) != 0) | ((np.diff(rows.row) != 1) & (rows.segment[1:] >= 0))
    )
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(rows)]])
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield Run(start, end, int(rows.segment[start]), int(rows.row[start]), int(delta[start]))


def gather(
    rows: RowMap,
    segments: Sequence[Rows],
    token_ids: np.ndarray,
    rotations: Sequence[LayerRotation] | None,
    *,
    room: int = 0,
    device: torch.device | str = "cpu",
) -> KVCache:
    """A fresh cache `[L, H, N + room, D]` of the rows, every key turned from its origin to its place.

    Rows that are stored nowhere are left zero. `rotations` is one entry a layer; None keeps the keys as they
    were computed (for storing) and is an error where a used key has moved.
    """
    import numpy as np
    import torch

    from kvfix.core import KVCache

    if len(rows) != len(token_ids):
        raise ValueError(f"{len(rows)} rows but {len(token_ids)} token ids")
    like = segments[0]
    layers, heads, _, dim = like.keys.shape
    keys = torch.empty(layers, heads, len(rows) + room, dim, dtype=like.keys.dtype, device=device)
    values = torch.empty(layers, heads, len(rows) + room, like.values.shape[-1], dtype=keys.dtype, device=device)
    inv_freq = [torch.tensor(layer.inv_freq, dtype=torch.float32) for layer in rotations or ()]
    for run in runs(rows):
        new = slice(run.start, run.end)
        if run.segment < 0:
            keys[:, :, new] = 0
            values[:, :, new] = 0
            continue
        old = slice(run.row, run.row + run.end - run.start)
        values[:, :, new].copy_(segments[run.segment].values[:, :, old])
        _move(keys[:, :, new], segments[run.segment].keys[:, :, old], run.delta, rotations, inv_freq)
    return KVCache(keys, values, np.asarray(token_ids), np.arange(len(rows)))


def _move(
    target: torch.Tensor,
    stored: torch.Tensor,
    delta: int,
    rotations: Sequence[LayerRotation] | None,
    inv_freq: list[torch.Tensor],
) -> None:
    """Copy one run's keys layer by layer (so that a layer is turned while it is in the processor's cache)."""
    from kvfix.ops import rotate_keys

    if delta == 0:
        target.copy_(stored)
        return
    if rotations is None:
        raise ValueError("keys have moved, but the model's rotation is not known")
    for layer, rotation in enumerate(rotations):
        target[layer].copy_(stored[layer])
        rotate_keys(target[layer], delta, inv_freq[layer], rotation.interleaved)
