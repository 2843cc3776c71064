"""What a repair is worth: margin, margin recovery, flip, KL recovery and state similarity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MARGIN_FLOOR = 0.05  # nats
NOISE_FACTOR = 10.0
KL_FLOOR = 0.005  # nats per token


def margin(new_logprob_mean: float | None, old_logprob_mean: float | None) -> float | None:
    """Length-averaged log-probability of the new answer minus the old one's, in nats.

    None stands for an empty answer: the margin of a pure insertion is the new answer's mean alone, of a pure
    deletion minus the old one's.
    """
    if new_logprob_mean is None and old_logprob_mean is None:
        return None
    return (new_logprob_mean or 0.0) - (old_logprob_mean or 0.0)


def margin_recovery(
    stale: float | None, repaired: float | None, fresh: float | None, noise: float = 0.0
) -> float | None:
    """(repaired - stale) / (fresh - stale), unclipped; None unless the gap exceeds max(0.05 nats, 10 x `noise`)."""
    if stale is None or repaired is None or fresh is None:
        return None
    gap, gained = fresh - stale, repaired - stale
    if not all(map(math.isfinite, (gap, gained, noise))) or abs(gap) <= max(MARGIN_FLOOR, NOISE_FACTOR * noise):
        return None
    return gained / gap


def flip(continuation: str, new: str, old: str) -> bool | None:
    """Whether the greedy continuation holds the new answer and not the old one, surrounding whitespace aside.

    None where the question has no answer: one of the two is empty or contains the other.
    """
    new, old = new.strip(), old.strip()
    if not new or not old or new in old or old in new:
        return None
    return new in continuation and old not in continuation


def kl_recovery(fresh_logprobs: torch.Tensor, repaired: torch.Tensor, stale: torch.Tensor) -> float | None:
    """1 - KL(fresh‖repaired) / KL(fresh‖stale) over next-token log-probabilities `[T, V]`, in fp32.

    The ratio is this project's definition. None where the stale cache is nearer than 0.005 nats a token, or where
    a figure is not finite.
    """
    stale_kl, repaired_kl = kl_mean(fresh_logprobs, stale), kl_mean(fresh_logprobs, repaired)
    if not stale_kl >= KL_FLOOR or not math.isfinite(stale_kl) or not math.isfinite(repaired_kl):
        return None
    return 1.0 - repaired_kl / stale_kl


def kl_mean(fresh_logprobs: torch.Tensor, other: torch.Tensor) -> float:
    """KL(fresh‖other) in nats, the mean over the T positions of two `[T, V]` log-probability tensors (NaN if T is 0).

    Both are normalised again in fp32: rounding to bf16 leaves sums that are not 1.
    """
    fresh, other = fresh_logprobs.float().log_softmax(-1), other.float().log_softmax(-1)
    # a token of probability 0 contributes nothing, whatever the other side gives it
    terms = (fresh.exp() * (fresh - other)).masked_fill(fresh == -math.inf, 0.0)
    return float(terms.sum(-1).mean())


def cksim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """CacheSlide's similarity `[N]` of two layers' states `[H, N, D]`: each token's cosine, mean over heads, in fp32.

    Keys and values are compared apart, at the same positions.
    """
    import torch.nn.functional as F

    return F.cosine_similarity(a.float(), b.float(), dim=-1).mean(dim=0)


def median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured; None where nothing was."""
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what was measured; None where nothing was."""
    known = [value for value in values if value is not None]
    return float(statistics.fmean(known)) if known else None


def rate(flags: Iterable[bool | None]) -> float | None:
    """The share of true among what was measured; None where nothing was."""
    return mean(None if flag is None else float(flag) for flag in flags)
