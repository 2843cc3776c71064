"""The obvious twin: a copy into a slice, or by index, for each part."""

from __future__ import annotations

import torch

from kvfix.ops.packing import Pack


def scatter_kv_naive(
    pack: Pack,
    layer: int,
    keys: torch.Tensor,  # [l, H, M, D]
    values: torch.Tensor,  # [l, H, M, Dv]
) -> None:
    """Write rows into their parts' slots, in place."""
    layers = slice(layer, layer + len(keys))
    for part, rows in pack:
        assert part.slots is not None
        for target, fresh in ((part.keys, keys), (part.values, values)):
            if part.run is not None:
                target[layers, :, part.run].copy_(fresh[:, :, rows])
            else:
                target[layers].index_copy_(2, part.slots.to(target.device), fresh[:, :, rows])
