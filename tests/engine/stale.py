"""A stale cache in its new order: what evidence and diagnoses are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvfix.align import allocate, gather, turn
from kvfix.core import KVCache, RowMap, TokenDiff
from kvfix.diff import diff_tokens
from kvfix.engine import Engine

NUM_OLD = 90


def ids_of(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 300, num_tokens)


def changed(*edits: tuple[int, int, int]) -> np.ndarray:
    """The old ids with `num_old` tokens at `start` replaced by `num_new` others; edits in order."""
    ids, out, at = ids_of(NUM_OLD), [], 0
    for start, num_old, num_new in edits:
        out += [*ids[at:start], *ids_of(num_new, seed=start + 1)]
        at = start + num_old
    return np.array([*out, *ids[at:]])


# name → (start, old tokens, new tokens) of each span
EDITS = {
    "same length": [(30, 3, 3)],
    "growing": [(30, 2, 7)],
    "shrinking": [(30, 7, 2)],
    "an insertion": [(30, 0, 4)],
    "a deletion": [(30, 4, 0)],
    "several spans": [(20, 2, 5), (50, 3, 3), (75, 4, 1)],
    "the first token": [(0, 1, 1)],
    "near the end": [(86, 1, 1)],
    "the last token": [(89, 1, 1)],
    "appended": [(90, 0, 3)],
}


@dataclass
class Stale:
    """An edit of `NUM_OLD` tokens: its diff, and the old rows in the new order with room behind them."""

    diff: TokenDiff
    cache: KVCache
    stored: Callable[[np.ndarray, int], torch.Tensor]  # values in the old order

    @property
    def old_rows(self) -> np.ndarray:
        return self.diff.stale_source()


def stale_of(engine: Engine, edit: str, room: int = 100) -> Stale:
    old_ids, new_ids = ids_of(NUM_OLD), changed(*EDITS[edit])
    diff = diff_tokens(old_ids, new_ids)
    old = engine.prefill(old_ids)
    rows = RowMap.of_base(np.arange(NUM_OLD)).realigned(diff.stale_source())
    cache = allocate(old, rows, new_ids, room, engine.device)
    gather(cache, rows, [old])
    turn(cache, rows, engine.rotations)
    return Stale(diff, cache, values_of(old))


def values_of(old: KVCache) -> Callable[[np.ndarray, int], torch.Tensor]:
    """Values `[m, H, D]` of rows at a layer."""
    return lambda positions, layer: old.values[layer, :, positions].transpose(0, 1)
