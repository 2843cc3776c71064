"""How far two states of the same rows lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfix.ops.backend import dispatch
from kvfix.ops.kv_deviation.naive import kv_deviation_naive

__all__ = ["kv_deviation"]


def kv_deviation(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],  # each [H, N, D] and [H, N, D]: keys, values or both
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """`[N]` fp32: ‖one − other‖² of each row, heads, dims and pairs summed. `backend`: see `backend.dispatch`."""

    def kernel() -> torch.Tensor:
        from kvfix.ops.kv_deviation.kernel import kv_deviation_kernel

        return kv_deviation_kernel(pairs)

    return dispatch("kv_deviation", backend, pairs[0][0], kernel, lambda: kv_deviation_naive(pairs))
