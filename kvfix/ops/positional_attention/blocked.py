"""Positional attention in blocks of query rows: the mask of a block spans only the keys it can see."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvfix.ops.packing import Pack, Part

BLOCK_ROWS = 256
# a block's mask is made once for all layers unless it has more entries than this
KEPT_MASK = 2**20


class Rules(NamedTuple):
    """What beside position decides a score."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [Hq]


def packed_attention_blocked(query: torch.Tensor, pack: Pack, layer: int, **rules: Any) -> torch.Tensor:
    """`packed_attention` one document after another."""
    of_all = Rules(**rules)
    outputs = [attend_blocked(query[:, rows], part, layer, of_all, pack.kept) for part, rows in pack]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def is_whole(part: Part, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> bool:
    """Whether the rows are all of a sequence and see all that stands before them: plain causal attention."""
    return softcap is None and sinks is None and part.whole and (window is None or window >= part.num_seen)


def attend_blocked(query: torch.Tensor, part: Part, layer: int, rules: Rules, kept: dict[Any, Any]) -> torch.Tensor:
    """Attention output `[M, Hq, Dv]` of one document's rows `[Hq, M, D]`; masks for the next layer go into `kept`.

    The whole of a sequence without a window takes SDPA's causal path. Positions stay on the CPU, so that no block
    waits for the device.
    """
    keys, values = part.seen(layer)
    if is_whole(part, rules.window, rules.softcap, rules.sinks):
        out = scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=rules.scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    attend = _attend_sdpa if rules.softcap is None and rules.sinks is None else _attend_by_hand
    blocks = []
    for start in range(0, query.shape[1], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        seen = _keys_seen(part, rows, rules.window)
        mask = _mask(query, part, rows, seen, rules.window, kept)
        blocks.append(attend(query[:, rows], keys[:, seen], values[:, seen], mask, rules))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _keys_seen(part: Part, rows: slice, window: int | None) -> slice:
    """The slots that some row of a block may see."""
    if part.key_positions is not None:
        return slice(0, part.num_seen)
    positions = part.positions[rows]
    first, last = int(positions[0]), int(positions[-1])
    return slice(0 if window is None else max(0, first - window + 1), min(part.num_seen, last + 1))


def _mask(
    query: torch.Tensor, part: Part, rows: slice, seen: slice, window: int | None, kept: dict[Any, Any]
) -> torch.Tensor:
    """`[Hq / H · rows of the block, keys seen]`, to be added to scores: 0 where a row sees a key, else -inf."""
    name = ("mask", id(part), rows.start, window)
    if name in kept:
        return kept[name]
    positions = part.positions[rows, None]
    key_positions = torch.arange(seen.start, seen.stop) if part.key_positions is None else part.key_positions
    visible = key_positions[None] <= positions
    if window is not None:
        visible &= key_positions[None] > positions - window
    visible = visible.to(query.device).repeat(query.shape[0] // part.keys.shape[1], 1)
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, float("-inf"))
    if mask.numel() <= KEPT_MASK:
        kept[name] = mask
    return mask


def _packed(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The query heads of one key head as rows of one matrix: `[Hq, M, D]` → `[H, Hq/H·M, D]`."""
    num_heads, num_rows, dim = query.shape
    return query.reshape(num_kv_heads, num_heads // num_kv_heads * num_rows, dim)


def _attend_sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rules: Rules
) -> torch.Tensor:
    num_heads, num_rows, _ = query.shape
    out = scaled_dot_product_attention(
        _packed(query, keys.shape[0])[None], keys[None], values[None], mask[None, None], scale=rules.scaling
    )
    return out.reshape(num_heads, num_rows, -1).transpose(0, 1)


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rules: Rules
) -> torch.Tensor:
    """Softcap and attention sinks, which SDPA does not know; softmax in fp32.

    Scores are rounded to the dtype first, as in the eager attention that such models take by themselves: from fp32
    scores a row may go to other experts than the model's own forward sends it to.
    """
    num_heads, num_rows, _ = query.shape
    scores = (_packed(query, keys.shape[0]) @ keys.transpose(1, 2)).float() * rules.scaling
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = (scores + mask).reshape(num_heads, num_rows, -1)
    peak = scores.amax(-1, keepdim=True)
    if rules.sinks is not None:
        sinks = rules.sinks.float()[:, None, None]
        peak = torch.maximum(peak, sinks)
    weights = (scores - peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if rules.sinks is not None:
        total = total + (sinks - peak).exp()
    weights = (weights / total).to(values.dtype)
    out = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values
    return out.reshape(num_heads, num_rows, -1).transpose(0, 1)
