"""Whole caches: prefilled behind another's rows, copied, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvfix.core import KVCache

if TYPE_CHECKING:
    from kvfix.engine import Engine


def prefill_behind(engine: Engine, token_ids: np.ndarray, room: int, before: KVCache | None) -> KVCache:
    """A cache of these tokens; the rows of what they share with `before` at the start are copied from there."""
    cache = engine.new_cache(token_ids, room)
    shared = 0
    if before is not None and not engine.positions.crosses(len(before), len(cache)):
        shorter = min(len(before), len(cache))
        differs = np.flatnonzero(before.token_ids[:shorter] != token_ids[:shorter])
        shared = int(differs[0]) if len(differs) else shorter
        cache.keys[:, :, :shared] = before.keys[:, :, :shared]
        cache.values[:, :, :shared] = before.values[:, :, :shared]
    engine.recompute(cache, np.arange(shared, len(cache)))
    return cache


def copied(cache: KVCache) -> KVCache:
    """A cache of its own with the same rows."""
    return KVCache(cache.keys.clone(), cache.values.clone(), cache.token_ids, cache.origin.copy())


def equal_until(end: int, one: KVCache, other: KVCache) -> bool:
    """Whether the rows up to `end` are the same bit for bit."""
    import torch

    pairs = ((one.keys, other.keys), (one.values, other.values))
    return all(torch.equal(mine[:, :, :end], theirs[:, :, :end]) for mine, theirs in pairs)
