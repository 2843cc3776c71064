"""The tensors of new segments, from what the engine computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfix.errors import NonFiniteError
from kvfix.store import sources, texts

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvfix.store.snapshot import Snapshot


@dataclass(frozen=True)
class NewRows:
    """Rows to be stored: M of a document's N."""

    token_ids: np.ndarray  # [N] int64
    source: np.ndarray  # [N] int64: the kept row of the version before, or -1
    positions: np.ndarray  # [M] int64, ascending
    keys: torch.Tensor  # [L, H, M, D]
    values: torch.Tensor  # [L, H, M, Dv]


def check_finite(*tensors: torch.Tensor) -> None:
    """Raise NonFiniteError if a row holds NaN or infinity; one layer at a time."""
    for tensor in tensors:
        for layer in tensor if tensor.numel() else ():
            # both ends are NaN if any number is, and this is far cheaper than isfinite over all
            lowest, highest = layer.aminmax()
            if not bool(lowest.isfinite() and highest.isfinite()):
                raise NonFiniteError()


def base_tensors(
    keys: torch.Tensor, values: torch.Tensor, token_ids: np.ndarray, origin: np.ndarray, text: str
) -> dict[str, torch.Tensor]:
    """A base segment: keys and values `[L, H, N, D]`, token ids and origins `[N]`, text."""
    return {
        **_packed(keys, values),
        "token_ids": _ints(token_ids),
        "origin": _ints(origin),
        "text": _bytes(texts.pack(text, None)),
    }


def patch_tensors(new: NewRows, text: str, previous: str) -> dict[str, torch.Tensor]:
    """A patch segment: the M new rows and where all others come from."""
    import numpy as np

    return {
        **_packed(new.keys, new.values),
        "token_ids": _ints(new.token_ids[new.positions]),
        "positions": _ints(new.positions),
        "source": _ints(sources.to_runs(new.source)),
        "num_rows": _ints(np.array([len(new.token_ids)])),
        "text": _bytes(texts.pack(text, previous)),
    }


def check_rows(new: NewRows, snapshot: Snapshot) -> None:
    """Raise ValueError unless every row is new, or kept from a row of the snapshot with the same token."""
    import numpy as np

    num_rows, positions = len(new.token_ids), new.positions
    if len(new.source) != num_rows or (num_rows and new.source.max() >= len(snapshot.token_ids)):
        raise ValueError("the source map does not fit the two versions")
    if len(positions) and (positions[0] < 0 or positions[-1] >= num_rows or (np.diff(positions) < 1).any()):
        raise ValueError("positions must be ascending places of the new version")
    kept = np.ones(num_rows, bool)
    kept[positions] = False
    if (new.source[kept] < 0).any():
        raise ValueError("a row is neither new nor kept")
    if (snapshot.token_ids[new.source[kept]] != new.token_ids[kept]).any():
        raise ValueError("a kept row stands for another token than before")
    check_shapes(new, snapshot)


def check_shapes(new: NewRows, snapshot: Snapshot) -> None:
    """Raise ValueError unless the new tensors have M rows and the stored ones' layers, heads, dims and dtype."""
    for name in ("keys", "values"):
        tensor = getattr(new, name)
        if tensor.shape[2] != len(new.positions):
            raise ValueError(f"{tensor.shape[2]} rows of {name} for {len(new.positions)} positions")
        for segment in snapshot.segments[:1]:
            stored = getattr(segment, name)
            if tensor.shape[:2] + tensor.shape[3:] != stored.shape[:2] + stored.shape[3:]:
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} cannot join {tuple(stored.shape)}")
            if tensor.dtype != stored.dtype:
                raise ValueError(f"{name} in {tensor.dtype} cannot join {stored.dtype}")


def _packed(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Both on the CPU, contiguous and, because safetensors asks for it, each in memory of its own."""
    keys, values = keys.detach().cpu().contiguous(), values.detach().cpu().contiguous()
    if keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
        values = values.clone()
    return {"keys": keys, "values": values}


def _ints(numbers: np.ndarray) -> torch.Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.array(numbers, np.int64))


def _bytes(content: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
