"""Base and patches folded into one new base, every key as it was computed."""

from __future__ import annotations

from collections.abc import Sequence
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
    for run in rows.runs():
        old = slice(run.row, run.row + run.end - run.start)
        keys[:, :, run.start : run.end] = segments[run.segment].keys[:, :, old]
        values[:, :, run.start : run.end] = segments[run.segment].values[:, :, old]
    return keys, values
