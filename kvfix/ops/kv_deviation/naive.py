"""The obvious twin: difference, square and sum in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def kv_deviation_naive(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """`[N]` fp32 from pairs of `[H, N, D]`."""
    squares = torch.zeros(pairs[0][0].shape[1], device=pairs[0][0].device)
    for one, other in pairs:
        squares += (one.float() - other.float()).square_().sum((0, 2))
    return squares
