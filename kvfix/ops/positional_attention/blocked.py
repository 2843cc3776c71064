"""Positional attention in blocks of query rows: the mask of a block spans only the keys it can see."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvfix.ops.packing import Pack, Part

BLOCK_ROWS = 256


class Rules(NamedTuple):
    """What beside position decides a score."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [Hq]


def packed_attention_blocked(query: torch.Tensor, pack: Pack, layer: int, **rules: Any) -> torch.Tensor:
    """`packed_attention` one document after another."""
    of_all = Rules(**rules)
    if len(pack.parts) == 1:
        return attend_blocked(query, pack.parts[0], layer, of_all)
    return torch.cat([attend_blocked(query[:, rows], part, layer, of_all) for part, rows in pack])


def is_whole(part: Part, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> bool:
    """Whether the rows are all of a sequence and see all that stands before them: plain causal attention."""
    return softcap is None and sinks is None and part.whole and (window is None or window >= part.num_seen)


def attend_blocked(query: torch.Tensor, part: Part, layer: int, rules: Rules) -> torch.Tensor:
    """Attention output `[M, Hq, Dv]` of one document's rows `[Hq, M, D]`.

    The whole of a sequence without a window takes SDPA's causal path. Positions stay on the CPU, so that no block
    waits for the device.
    """
    keys, values = part.seen(layer)
    if is_whole(part, rules.window, rules.softcap, rules.sinks):
        out = scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=rules.scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    blocks = []
    for start in range(0, query.shape[1], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        blocks.append(_block(query[:, rows], keys, values, part.positions[rows], part.key_positions, rules))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor | None,
    rules: Rules,
) -> torch.Tensor:
    first, last = int(positions[0]), int(positions[-1])
    low, high = 0, keys.shape[1]
    if key_positions is None:
        low = 0 if rules.window is None else max(0, first - rules.window + 1)
        high = min(high, last + 1)
        key_positions = torch.arange(low, high)
    visible = key_positions[None] <= positions[:, None]
    if rules.window is not None:
        visible &= key_positions[None] > positions[:, None] - rules.window
    keys, values = keys[:, low:high], values[:, low:high]
    attend = _attend_sdpa if rules.softcap is None and rules.sinks is None else _attend_by_hand
    return attend(query, keys, values, visible.to(query.device), rules)


def _packed(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The query heads of one key head as rows of one matrix: `[Hq, M, D]` → `[H, Hq/H·M, D]`."""
    num_heads, num_rows, dim = query.shape
    return query.reshape(num_kv_heads, num_heads // num_kv_heads * num_rows, dim)


def _attend_sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, rules: Rules
) -> torch.Tensor:
    num_heads, num_rows, _ = query.shape
    groups = num_heads // keys.shape[0]
    out = scaled_dot_product_attention(
        _packed(query, keys.shape[0])[None],
        keys[None],
        values[None],
        visible.repeat(groups, 1)[None, None],
        scale=rules.scaling,
    )
    return out.reshape(num_heads, num_rows, -1).transpose(0, 1)


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, rules: Rules
) -> torch.Tensor:
    """Softcap and attention sinks, which SDPA does not know; softmax in fp32."""
    num_heads, num_rows, _ = query.shape
    packed = _packed(query, keys.shape[0])
    scores = (packed @ keys.transpose(1, 2)).float().reshape(num_heads, num_rows, -1) * rules.scaling
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.masked_fill_(~visible, float("-inf"))
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
