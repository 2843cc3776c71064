"""Stored rows into a cache in their present order: one gather, and one rotation of every key that has moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvfix.core import KVCache, LayerRotation, RowMap, Run


ALL_LAYERS = slice(None)


class Rows(Protocol):
    """A stored segment's tensors."""

    @property
    def keys(self) -> torch.Tensor: ...  # [L, H, M, D]

    @property
    def values(self) -> torch.Tensor: ...  # [L, H, M, Dv]


def allocate(segment: Rows, rows: RowMap, token_ids: np.ndarray, room: int, device: torch.device | str) -> KVCache:
    """A cache `[L, H, N + room, D]` shaped like a segment, its rows not filled yet, its room zero."""
    import torch

    from kvfix.core import KVCache

    if len(rows) != len(token_ids):
        raise ValueError(f"{len(rows)} rows but {len(token_ids)} token ids")
    tensors = []
    for like in (segment.keys, segment.values):
        layers, heads, _, dim = like.shape
        tensor = torch.empty(layers, heads, len(rows) + room, dim, dtype=like.dtype, device=device)
        tensor[:, :, len(rows) :] = 0
        tensors.append(tensor)
    return KVCache(tensors[0], tensors[1], token_ids, rows.origin.copy())


def gather(
    cache: KVCache,
    rows: RowMap,
    segments: Sequence[Rows],
    start: int = 0,
    end: int | None = None,
    layers: slice = ALL_LAYERS,
) -> None:
    """Copy the stored rows `[start, end)` of some layers into the cache, in place, keys as they were computed.

    Rows that are stored nowhere become zero.
    """
    for run in rows.runs(start, end):
        _copy(cache, "keys", run, segments, layers)
        _copy(cache, "values", run, segments, layers)


def _copy(cache: KVCache, part: str, run: Run, segments: Sequence[Rows], layers: slice = ALL_LAYERS) -> None:
    """A run's keys or values as they are stored, in place; zero where they are stored nowhere."""
    target = getattr(cache, part)[layers, :, run.start : run.end]
    if run.segment < 0:
        target.zero_()
        return
    target.copy_(getattr(segments[run.segment], part)[layers, :, run.row : run.row + run.end - run.start])


def folded(rows: RowMap, segments: Sequence[Rows], token_ids: np.ndarray) -> KVCache:
    """All rows in one new cache on the CPU, keys as they were computed: what a new base is made of."""
    cache = allocate(segments[0], rows, token_ids, 0, "cpu")
    gather(cache, rows, segments)
    return cache


def aligned(
    rows: RowMap,
    segments: Sequence[Rows],
    token_ids: np.ndarray,
    room: int,
    device: torch.device | str,
    rotations: Sequence[LayerRotation] | None,
) -> KVCache:
    """All rows in one new cache, moved keys turned to their place; rows that are stored nowhere are zero."""
    import numpy as np

    from kvfix.ops import rotate_keys

    cache = allocate(segments[0], rows, token_ids, room, device)
    runs = list(rows.runs())
    if rotations is None or not _moved(runs):
        gather(cache, rows, segments)
        turn(cache, rows, rotations)
        return cache
    for run in runs:
        _copy(cache, "values", run, segments)
        if run.segment < 0:
            _copy(cache, "keys", run, segments)
    for number, segment in enumerate(segments):
        # keys are turned on their way, so that no row is written twice
        rotate_keys(cache.keys, [run for run in runs if run.segment == number], rotations, source=segment.keys)
    cache.origin = np.arange(len(rows))
    return cache


def _moved(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.delta != 0 and run.segment >= 0]


def values_at(rows: RowMap, segments: Sequence[Rows], positions: np.ndarray, layer: int) -> torch.Tensor:
    """`[len(positions), H, Dv]`: the stored values of these rows at one layer; none of them may be stored nowhere."""
    import torch

    runs = rows.realigned(positions).runs()
    parts = [segments[run.segment].values[layer, :, run.row : run.row + run.end - run.start] for run in runs]
    return torch.cat([segments[0].values[layer, :, :0], *parts], 1).transpose(0, 1)


def turn(
    cache: KVCache,
    rows: RowMap,
    rotations: Sequence[LayerRotation] | None,
    start: int = 0,
    end: int | None = None,
    layers: slice = ALL_LAYERS,
) -> None:
    """Rotate the gathered keys `[start, end)` of some layers from their origin to their place, in place.

    Once for each row and layer. `rotations` holds one entry a layer; None (keys that do not simply turn) raises
    `ValueError` if a row moved.
    """
    import numpy as np

    from kvfix.ops import rotate_keys

    moved = _moved(rows.runs(start, end))
    if not moved:
        return
    if rotations is None:
        raise ValueError("keys have moved, but this model's keys do not simply turn with position")
    rotate_keys(cache.keys[layers], moved, rotations[layers])
    if layers.indices(cache.num_layers)[1] == cache.num_layers:
        for run in moved:
            cache.origin[run.start : run.end] = np.arange(run.start, run.end)
