"""The cache of one forward pass: rows written at their slots of caches that already hold the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from kvfix.core import KVCache
from kvfix.ops import Pack, Part, scatter_kv

# the position of a key that no row sees
NEVER = np.iinfo(np.int64).max


@dataclass
class Rows:
    """The rows of one cache that a forward pass computes.

    A row is written into its slot and turned to its position; the two differ only for text that is tried behind
    the document, where several continuations share the room. Slot i of a document stands at position i.
    """

    cache: KVCache
    token_ids: np.ndarray  # [M] int64
    positions: np.ndarray  # [M] int64, ascending
    slots: np.ndarray  # [M] int64, ascending
    key_positions: torch.Tensor | None = None  # [slots seen] int64; None: slot i stands at position i

    @classmethod
    def at(cls, cache: KVCache, positions: np.ndarray) -> Rows:
        """Rows of the document itself, at their own positions."""
        positions = np.asarray(positions, np.int64)
        return cls(cache, cache.token_ids[positions], positions, positions)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def part(self) -> Part:
        """Their share of a pass: they see every slot up to their last one."""
        positions, slots = (torch.from_numpy(np.ascontiguousarray(a)) for a in (self.positions, self.slots))
        return Part(self.cache.keys, self.cache.values, positions, int(self.slots[-1]) + 1, slots, self.key_positions)


class EnoughError(Exception):
    """Ends a pass whose further layers nobody needs."""


class PassCache(Cache):
    """What the model sees as its cache during one pass; the attention function reads the rows elsewhere.

    `ends` at the layer whose keys and values are the last that are wanted.
    """

    def __init__(self, groups: list[Rows], pack: Pack, ends: int | None = None, backend: str | None = None) -> None:
        super().__init__(layers=[])
        self.groups, self.pack, self.ends, self.backend = groups, pack, ends, backend
        self.updated: list[int] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's rows `[1, H, M, D]` into their caches. Raises `EnoughError` at the end."""
        self.updated.append(layer_idx)
        for rows in self.groups:
            rows.cache.ready(layer_idx)
        scatter_kv(self.pack, layer_idx, key_states, value_states, backend=self.backend)
        for rows in self.groups:
            rows.cache.written(layer_idx)
        if layer_idx == self.ends:
            raise EnoughError
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: object, **kwargs: object) -> int:
        return 0


def as_transformers_cache(cache: KVCache, end: int | None = None) -> DynamicCache:
    """A fresh `DynamicCache` that holds a copy of the document's rows (up to `end`), ready for `generate`."""
    copy = DynamicCache()
    for layer in range(cache.num_layers):
        keys, values = cache.layer(layer)
        copy.update(keys[None, :, :end].clone(), values[None, :, :end].clone(), layer)
    return copy
