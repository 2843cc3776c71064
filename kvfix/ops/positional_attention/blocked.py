"""Positional attention in blocks of query rows: the mask of a block spans only the keys it can see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 256


class Rules(NamedTuple):
    """What beside position decides a score."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [Hq]


def positional_attention(
    query: torch.Tensor,  # [Hq, M, D]
    keys: torch.Tensor,  # [H, N, D]
    values: torch.Tensor,  # [H, N, Dv]
    positions: torch.Tensor,  # [M] int64 on the CPU, ascending
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,  # [N] int64 on the CPU; None: key i stands at position i
) -> torch.Tensor:
    """Attention output `[M, Hq, Dv]`: a row sees the keys at positions (position - window, position].

    The whole of a sequence without a window takes SDPA's causal path. `positions` and `key_positions` stay on
    the CPU, so that no block waits for the device.
    """
    rules = Rules(scaling, window, softcap, sinks)
    num_rows, num_keys = query.shape[1], keys.shape[1]
    plain = softcap is None and sinks is None and key_positions is None
    whole = num_rows == num_keys and int(positions[0]) == 0 and int(positions[-1]) == num_rows - 1
    if plain and whole and (window is None or window >= num_keys):
        out = scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    blocks = []
    for start in range(0, num_rows, BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, num_rows))
        blocks.append(_block(query[:, rows], keys, values, positions[rows], key_positions, rules))
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
