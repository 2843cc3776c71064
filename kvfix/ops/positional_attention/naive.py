"""The obvious twin: one dense mask, one softmax in fp32."""

from __future__ import annotations

from typing import Any

import torch

from kvfix.ops.packing import Pack


def positional_attention_naive(
    query: torch.Tensor,  # [Hq, M, D]
    keys: torch.Tensor,  # [H, N, D]
    values: torch.Tensor,  # [H, N, Dv]
    positions: torch.Tensor,  # [M]
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
    key_positions: torch.Tensor | None = None,  # [N]; None: key i stands at position i
) -> torch.Tensor:
    """Attention output `[M, Hq, Dv]`: a row sees the keys at positions (position - window, position]."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0).float(), values.repeat_interleave(groups, 0).float()
    if key_positions is None:
        key_positions = torch.arange(keys.shape[1], device=keys.device)
    positions, key_positions = positions.to(keys.device), key_positions.to(keys.device)
    visible = key_positions[None] <= positions[:, None]
    if window is not None:
        visible &= key_positions[None] > positions[:, None] - window
    scores = query.float() @ keys.transpose(1, 2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sink_scores], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).transpose(0, 1).to(query.dtype)


def packed_attention_naive(query: torch.Tensor, pack: Pack, layer: int, **rules: Any) -> torch.Tensor:
    """Attention output `[M, Hq, Dv]` of the rows `[Hq, M, D]` of several documents, one after another."""
    outputs = [
        positional_attention_naive(
            query[:, rows], *part.seen(layer), part.positions, key_positions=part.key_positions, **rules
        )
        for part, rows in pack
    ]
    return torch.cat(outputs)
