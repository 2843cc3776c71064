"""Random rows: the control that every other selector has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector


@dataclass(frozen=True)
class RandomSelector(Selector):
    """B rows drawn uniformly from the pool D."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def select(self, context: SelectionContext) -> np.ndarray:
        pool = np.flatnonzero(context.free)
        chosen = np.random.default_rng(self.seed).choice(pool, min(context.num_rows, len(pool)), replace=False)
        return np.sort(chosen)
