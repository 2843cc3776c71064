"""Deviation: the rows that an early layer computes most differently from the stale ones (CacheBlend, EuroSys 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector, top_rows


@dataclass(frozen=True)
class DeviationSelector(Selector):
    """The B rows of highest `Evidence.deviation`. Raises `UsageError` without a model, or for a layer it lacks.

    CacheBlend's code compares values, LMCache keys after RoPE; ours adds both unless `of` names one ("keys", "values").
    """

    name: ClassVar[str] = "deviation"
    needs_evidence: ClassVar[bool] = True
    of: str = "both"
    layer: int = 1  # at layer 0 a row depends on its own token alone

    def select(self, context: SelectionContext) -> np.ndarray:
        evidence = context.require_evidence(self)
        pool = np.flatnonzero(context.free)
        return top_rows(evidence.deviation(self.layer, self.of)[pool], pool, context.num_rows)
