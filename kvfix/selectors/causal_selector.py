"""Causal: the rows whose fresh state would help most, one at a time (CausalOracle of arXiv 2606.17107, 2609.17983)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector, top_rows


@dataclass(frozen=True)
class CausalSelector(Selector):
    """The B rows of highest `Diagnosis.transplant_effects`. A diagnostic; raises `UsageError` without a diagnosis."""

    name: ClassVar[str] = "causal"

    def select(self, context: SelectionContext) -> np.ndarray:
        diagnosis = context.require_diagnosis(self)
        pool = np.flatnonzero(context.free)
        return top_rows(diagnosis.transplant_effects(pool), pool, context.num_rows)
