"""Key rotation by runs: all rows of a run move by the same delta, so one cosine and one sine a pair serve them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Move(Protocol):
    """Consecutive rows that move by one delta."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def row(self) -> int: ...  # where they start in the tensor they come from
    @property
    def delta(self) -> int: ...


class Rotation(Protocol):
    """How one layer's keys turn: the first 2R dims of a head, in pairs (i, i + R), or (2i, 2i + 1) interleaved."""

    @property
    def inv_freq(self) -> Sequence[float]: ...  # [R]; empty: not at all
    @property
    def interleaved(self) -> bool: ...


def rotate_keys_runs(
    keys: torch.Tensor,  # [L, H, N, D], changed in place
    moves: Sequence[Move],
    rotations: Sequence[Rotation],
    source: torch.Tensor | None = None,
) -> None:
    """`rotate_keys` a layer and a move at a time: a run is turned while it is in the processor's cache."""
    for layer, rotation in enumerate(rotations):
        inv_freq = torch.tensor(rotation.inv_freq, dtype=torch.float32)
        for move in moves:
            rows = keys[layer, :, move.start : move.end]
            if source is not None:
                rows.copy_(source[layer, :, move.row : move.row + move.end - move.start])
            turn_run(rows, move.delta, inv_freq, rotation.interleaved)


def turn_run(
    keys: torch.Tensor,  # [H, N, D], changed in place
    delta: int,
    inv_freq: torch.Tensor,  # [R] fp32; the first 2R dims of a head turn
    interleaved: bool = False,
) -> None:
    """Turn all rows by `delta` positions in place, in fp32, at unit magnitude.

    Pairs are (i, i + R), or (2i, 2i + 1) where `interleaved`; dims from 2R on stay (partial rotary).
    """
    half = len(inv_freq)
    if delta == 0 or half == 0:
        return
    angles = (inv_freq.double() * delta).to(keys.device)
    cos, sin = angles.cos().float(), angles.sin().float()
    if interleaved:
        first, second = keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
    else:
        first, second = keys[..., :half], keys[..., half : 2 * half]
    turned = first.float() * cos
    turned.addcmul_(second.float(), sin, value=-1)
    second.copy_((second.float() * cos).addcmul_(first.float(), sin))
    first.copy_(turned)
