"""Writes the rows of a pass into their documents' keys and values."""

from __future__ import annotations

import torch

from kvfix.ops.backend import dispatch
from kvfix.ops.packing import Pack
from kvfix.ops.scatter_kv.naive import scatter_kv_naive

__all__ = ["scatter_kv"]


def scatter_kv(
    pack: Pack,
    layer: int,
    keys: torch.Tensor,  # [l, H, M, D]
    values: torch.Tensor,  # [l, H, M, Dv]
    *,
    backend: str | None = None,
) -> None:
    """Write the rows of a pack's parts into their slots of the layers `layer` to `layer + l`, in place.

    `backend`: see `kvfix.ops.backend.dispatch`.
    """

    def kernel() -> None:
        from kvfix.ops.scatter_kv.kernel import scatter_kv_kernel

        scatter_kv_kernel(pack, layer, keys, values)

    # a slice or an index a part, which is what the CPU is quickest at too
    dispatch("scatter_kv", backend, keys, kernel, lambda: scatter_kv_naive(pack, layer, keys, values))
