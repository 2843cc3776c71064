"""The cache of one forward pass: rows written at their slots of caches that already hold the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from kvfix.core import KVCache

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

    def __post_init__(self) -> None:
        self.num_seen = int(self.slots[-1]) + 1
        self.contiguous = self.num_seen - int(self.slots[0]) == len(self.slots)
        self.host_positions = torch.from_numpy(np.ascontiguousarray(self.positions))

    @classmethod
    def at(cls, cache: KVCache, positions: np.ndarray) -> Rows:
        """Rows of the document itself, at their own positions."""
        positions = np.asarray(positions, np.int64)
        return cls(cache, cache.token_ids[positions], positions, positions)

    def __len__(self) -> int:
        return len(self.slots)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write `[H, M, D]` rows into one layer, in place."""
        for target, fresh in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
            if self.contiguous:
                target[:, int(self.slots[0]) : self.num_seen].copy_(fresh)
            else:
                target.index_copy_(1, torch.from_numpy(self.slots).to(target.device), fresh)

    def seen(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values up to the last written slot: `[H, num_seen, D]` views."""
        return self.cache.keys[layer, :, : self.num_seen], self.cache.values[layer, :, : self.num_seen]


class PassCache(Cache):
    """What the model sees as its cache during one pass; the attention function reads the rows elsewhere."""

    def __init__(self, groups: list[Rows]) -> None:
        super().__init__(layers=[])
        self.groups = groups
        self.updated: list[int] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's rows `[1, H, M, D]` into their caches."""
        self.updated.append(layer_idx)
        start = 0
        for rows in self.groups:
            end = start + len(rows)
            rows.write(layer_idx, key_states[0, :, start:end], value_states[0, :, start:end])
            start = end
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
