"""Evidence: what the model can tell of stale rows before any is repaired - a question's attention, early deviation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import normalize

from kvfix.core import KVCache, TokenDiff
from kvfix.engine.attention import Pass
from kvfix.engine.cache import NEVER, Rows
from kvfix.engine.engine import CHUNK_ROWS
from kvfix.errors import DocumentError, UsageError
from kvfix.ops import Pack, kv_deviation, packed_attention

if TYPE_CHECKING:
    from kvfix.engine.engine import Engine

BLOCK_ROWS = 64

PARTS = {"keys": ("keys",), "values": ("values",), "both": ("keys", "values")}


class StaleEvidence:
    """Evidence of one stale cache `[L, H, N + room, D]`: old rows in the new order, keys turned, the new token ids.

    They were gathered by `diff.stale_source()`: where that is -1 a row holds nothing, and nothing looks at it. The
    document's rows are left bit for bit. `stored` gives the values `[m, H, D]` of rows in the old order at a layer.
    """

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        diff: TokenDiff,
        stored: Callable[[np.ndarray, int], torch.Tensor],
    ) -> None:
        self.engine, self.cache, self.diff, self.stored = engine, cache, diff, stored
        self.missing = diff.stale_source() < 0  # [N]

    @torch.inference_mode()
    def query_attention(self, query_ids: tuple[int, ...]) -> np.ndarray:
        """`[N]` fp32: mean over layers, query tokens and heads of a softmax over the document's keys alone.

        A layer with a window sees the keys that it would see, attention sinks take no share, and where a query token
        sees no key of the document it gives nothing. Source: ProphetKV, arXiv 2602.02579. Raises `DocumentError` for
        a query that does not fit behind the document, in the model's context or in the cache's room.
        """
        num_rows, end = len(self.cache), len(self.cache) + len(query_ids)
        self.engine.require_room(self.cache, len(query_ids))
        if end > self.cache.capacity:
            room = self.cache.capacity - num_rows
            raise DocumentError(f"a question of {len(query_ids)} tokens; the room behind the document is {room}")
        seen = np.arange(end)
        seen[:num_rows][self.missing] = NEVER
        slots = np.arange(num_rows, end)
        rows = Rows(self.cache, np.array(query_ids, np.int64), slots, slots, torch.from_numpy(seen))
        this = AttentionPass([rows], total=torch.zeros(num_rows, device=self.engine.device))
        self.engine.run_pass(this)
        return (this.total / this.num_softmaxes).cpu().numpy()

    def query_contrast(self, query_ids: tuple[int, ...]) -> np.ndarray:
        """`[N]` fp32: log of a question's attention over that of a question about nothing in particular.

        What every text draws to itself by its place or its marks falls out. 0 where one of the two sees nothing. Ours.
        Raises `DocumentError` as `query_attention` does.
        """
        asked = self.query_attention(query_ids)
        anyway = self.query_attention(self.engine.text.neutral_ids)
        found, seen = np.zeros_like(asked), (asked > 0) & (anyway > 0)
        found[seen] = np.log(asked[seen] / anyway[seen])
        return found

    @torch.inference_mode()
    def deviation(self, layer: int, of: str = "both") -> np.ndarray:
        """`[N]` fp32: ‖fresh − stale‖² of keys, values or both at `layer`, heads summed.

        Fresh is a pass over every row from the edit on, behind the stored rows before it, that ends where `layer` has
        its keys and values. 0 before the edit and for rows without a stale state; also at layer 0 for kept rows that
        have not moved: there token and position decide, and anything else is rounding. Source: CacheBlend. Raises
        `UsageError` for another `of` or a layer that is not there.
        """
        if of not in PARTS or not 0 <= layer < self.cache.num_layers:
            known = f"of: {', '.join(PARTS)}; layer: 0 to {self.cache.num_layers - 1}"
            raise UsageError(f"no deviation of {of!r} at layer {layer}; there are {known}")
        first = self.diff.first
        fresh = self._lower_layers(layer, np.arange(first, len(self.cache)))
        found = np.zeros(len(self.cache), np.float32)
        states = [[getattr(c, part)[layer, :, first : len(c)] for c in (fresh, self.cache)] for part in PARTS[of]]
        found[first:] = kv_deviation([(computed, stale) for computed, stale in states]).cpu().numpy()
        found[self.missing] = 0
        if layer == 0:
            found[self.diff.source == np.arange(len(found))] = 0
        return found

    @torch.inference_mode()
    def kinship(self, layer: int) -> np.ndarray:
        """`[N]` fp32: largest cosine of a row's values at `layer` to those of a row that the edit put in or took out.

        Heads together, all rows as they differ from the mean row. In lower layers values tell what a token means: rows
        that speak of the same thing in other words are near. Costs a pass over the spans through the layers up to this
        one. In a model with fewer layers its last is meant. 0 for rows without a stale state. Ours.
        """
        layer = min(layer, self.cache.num_layers - 1)
        num_rows, spans = len(self.cache), self.diff.spans
        put_in = np.flatnonzero(self.diff.source < 0)
        taken_out = np.concatenate([np.arange(span.old_start, span.old_end) for span in spans] or [put_in])
        stale = self.cache.values[layer, :, :num_rows].transpose(0, 1).float().flatten(1)
        new = self._lower_layers(layer, put_in).values[layer, :, put_in].transpose(0, 1).float().flatten(1)
        old = self.stored(taken_out, layer).to(stale.device).float().flatten(1)
        mean = stale[torch.from_numpy(~self.missing)].mean(0)
        edited = torch.cat([new, old]) - mean
        if not len(edited):
            return np.zeros(num_rows, np.float32)
        cosines = normalize(stale - mean, dim=-1) @ normalize(edited, dim=-1).T
        found = cosines.amax(-1).cpu().numpy()
        found[self.missing] = 0
        return found

    def _lower_layers(self, last: int, positions: np.ndarray) -> KVCache:
        """A cache of the layers up to `last`, the rows at `positions` computed anew."""
        stale = self.cache
        end, num_rows = last + 1, len(stale)
        cache = KVCache(
            stale.keys[:end, :, :num_rows].clone(),
            stale.values[:end, :, :num_rows].clone(),
            stale.token_ids,
            np.arange(num_rows),
        )
        # beyond LongRoPE's limit all rows must share one call, which decides the frequencies
        step = num_rows if self.engine.positions.crosses(num_rows, num_rows) else CHUNK_ROWS
        for start in range(0, len(positions), step):
            self.engine.compute([Rows.at(cache, positions[start : start + step])])
        return cache


@dataclass
class AttentionPass(Pass):
    """A pass over a question's rows that adds up how they attend to the first N keys of their cache."""

    total: torch.Tensor = field(kw_only=True)  # [N] fp32, added to in place
    num_softmaxes: int = 0  # layers · heads · query tokens so far

    def attend(self, query: torch.Tensor, pack: Pack, layer: int, **rules: Any) -> torch.Tensor:
        """`packed_attention`; what it gives is not changed by the adding up."""
        (part,) = pack.parts
        assert part.key_positions is not None
        at, positions = part.key_positions[None, : len(self.total)], part.positions[:, None]
        visible = at <= positions
        if rules["window"] is not None:
            visible &= at > positions - rules["window"]
        self.total += attention_received(query, part.seen(layer)[0], visible, rules["scaling"], rules["softcap"])
        self.num_softmaxes += query.shape[0] * query.shape[1]
        return packed_attention(query, pack, layer, **rules)


def attention_received(
    query: torch.Tensor,  # [Hq, M, D]
    keys: torch.Tensor,  # [H, N or more, D]
    visible: torch.Tensor,  # [M, N] bool, on the CPU
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """`[N]` fp32: softmax weights over the visible ones of the first N keys, summed over heads and query rows.

    A row that sees none of them gives nothing. One key head and a block of rows at a time.
    """
    seeing = visible.any(-1)
    query, visible = query[:, seeing.to(query.device)], visible[seeing].to(query.device)
    groups, num_keys = query.shape[0] // keys.shape[0], visible.shape[1]
    total = torch.zeros(num_keys, device=query.device)
    for head, own in enumerate(keys[:, :num_keys]):
        own, block = own.float(), query[head * groups : (head + 1) * groups].float()
        for rows, seen in zip(block.split(BLOCK_ROWS, 1), visible.split(BLOCK_ROWS), strict=True):
            scores = rows @ own.T * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            total += scores.masked_fill_(~seen, float("-inf")).softmax(-1).sum((0, 1))
    return total
