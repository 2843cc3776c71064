"""Base and patches folded into one new base, every key as it was computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvfix.core import RowMap


class Rows(Protocol):
    """Keys and values `[L, H, M, D]` of one segment."""

    @property
    def keys(self) -> torch.Tensor: ...

    @property
    def values(self) -> torch.Tensor: ...


def gather(rows: RowMap, segments: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[L, H, N, D]` in the order of `rows`, unrotated: their origins stay those of `rows`."""
    import torch

    first = segments[0]
    keys, values = (
        torch.empty(like.shape[0], like.shape[1], len(rows), like.shape[3], dtype=like.dtype)
        for like in (first.keys, first.values)
    )
    for start, end, segment, row in runs(rows):
        old = slice(row, row + end - start)
        keys[:, :, start:end] = segments[segment].keys[:, :, old]
        values[:, :, start:end] = segments[segment].values[:, :, old]
    return keys, values


def runs(rows: RowMap) -> Iterator[tuple[int, int, int, int]]:
    """Start, end, segment and first stored row of each stretch that lies together in one segment."""
    import numpy as np

    if len(rows) == 0:
        return
    breaks = (np.diff(rows.segment) != 0) | (np.diff(rows.row) != 1)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    ends = np.append(starts[1:], len(rows))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield start, end, int(rows.segment[start]), int(rows.row[start])
