"""Statistics paired by item: bootstrap intervals, Wilcoxon with Holm's correction, out-of-fold rank correlation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvfix.bench.extras import extra

NUM_RESAMPLES = 10_000
TIE_BAND = 0.05  # of margin recovery
NUM_FOLDS = 5
SEED = 0


class Score(NamedTuple):
    """How often one of two is better by more than the tie band."""

    wins: int
    ties: int
    losses: int


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% percentile interval of the mean of `[n]` values, one an item.

    Figures of as many items share their resamples, so that those of the same items are paired.
    """
    low, high = np.percentile(_resamples(len(values)) @ values, [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=4)
def _resamples(num_items: int) -> np.ndarray:
    """`[NUM_RESAMPLES, n]`: the share that each item has in each resample."""
    rng = np.random.default_rng(SEED)
    return rng.multinomial(num_items, np.full(num_items, 1 / num_items), NUM_RESAMPLES) / num_items


def wilcoxon(differences: np.ndarray) -> float:
    """p of the paired Wilcoxon signed-rank test, two-sided; 1 where all pairs are equal."""
    if not np.any(differences):
        return 1.0
    return float(extra("scipy.stats").wilcoxon(differences).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down correction: each p as if it were the only one of its family, in the order given."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(np.argsort(ps, kind="stable")):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


def score(differences: np.ndarray) -> Score:
    """Wins, ties and losses of `[n]` differences; a difference within the tie band is a tie."""
    wins, losses = int((differences > TIE_BAND).sum()), int((differences < -TIE_BAND).sum())
    return Score(wins, len(differences) - wins - losses, losses)


def out_of_fold(features: np.ndarray, target: np.ndarray) -> float | None:
    """Spearman's rank correlation of `[n]` targets with what linear models of `[n, f]` features predict out of fold.

    Each fifth of the items is predicted by a least-squares fit to the others. None for fewer than 10 items, and where
    the targets or all of each feature are the same.
    """
    num_items = len(target)
    if num_items < 2 * NUM_FOLDS or not np.ptp(target) or not np.ptp(features, axis=0).any():
        return None
    folds = np.array_split(np.random.default_rng(SEED).permutation(num_items), NUM_FOLDS)
    predicted = np.empty(num_items)
    for fold in folds:
        others = np.setdiff1d(np.arange(num_items), fold)
        predicted[fold] = _fitted(features[others], target[others], features[fold])
    return float(extra("scipy.stats").spearmanr(predicted, target).statistic)


def _fitted(features: np.ndarray, target: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Predictions of a least-squares fit with a constant, features scaled to unit spread."""
    middle, spread = features.mean(0), features.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    design = np.column_stack([np.ones(len(features)), (features - middle) / spread])
    weights = np.linalg.lstsq(design, target, rcond=None)[0]
    return np.column_stack([np.ones(len(wanted)), (wanted - middle) / spread]) @ weights
