"""Attention of query rows at arbitrary positions over the keys of their own document, masked by position."""

from __future__ import annotations

from typing import Any

import torch

from kvfix.ops.backend import dispatch
from kvfix.ops.packing import Pack, Part
from kvfix.ops.positional_attention.blocked import is_whole, packed_attention_blocked

__all__ = ["packed_attention", "positional_attention"]


def packed_attention(
    query: torch.Tensor,  # [Hq, M, D]
    pack: Pack,
    layer: int,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
    backend: str | None = None,
) -> torch.Tensor:
    """Attention output `[M, Hq, Dv]` of a pack's rows over one layer of their own documents.

    A row sees the keys of its part at positions (position - window, position]; attention sinks take a share of the
    softmax. Sums are fp32, and so are scores but in PyTorch's code for softcaps and sinks. `backend`: see
    `kvfix.ops.backend.dispatch`.
    """
    rules: dict[str, Any] = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": sinks}

    def plain() -> torch.Tensor:
        return packed_attention_blocked(query, pack, layer, **rules)

    def kernel() -> torch.Tensor:
        from kvfix.ops.positional_attention.kernel import packed_attention_kernel

        return packed_attention_kernel(query, pack, layer, **rules)

    # the whole of one sequence is what the library's own causal kernels are made for
    if backend is None and len(pack.parts) == 1 and is_whole(pack.parts[0], window, softcap, sinks):
        return plain()
    return dispatch("positional_attention", backend, query, kernel, plain)


def positional_attention(
    query: torch.Tensor,  # [Hq, M, D]
    keys: torch.Tensor,  # [H, N, D]
    values: torch.Tensor,  # [H, N, Dv]
    positions: torch.Tensor,  # [M] int64 on the CPU, ascending
    *,
    key_positions: torch.Tensor | None = None,  # [N] int64 on the CPU; None: key i stands at position i
    **rules: Any,
) -> torch.Tensor:
    """`packed_attention` of one document's rows over one layer: `[M, Hq, Dv]`."""
    part = Part(keys[None], values[None], positions, keys.shape[1], key_positions=key_positions)
    return packed_attention(query, Pack([part]), 0, **rules)
