"""Key rotation by runs: all rows of a run move by the same delta, so one cosine and one sine a pair serve them all."""

from __future__ import annotations

import torch


def rotate_keys(
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
