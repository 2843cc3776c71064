"""Exact: every row from the edit on - suffix re-prefill behind a cached prefix, what a user has without kvfix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector


@dataclass(frozen=True)
class ExactSelector(Selector):
    """The whole pool D, whatever the budget."""

    name: ClassVar[str] = "exact"

    def select(self, context: SelectionContext) -> np.ndarray:
        return np.flatnonzero(context.free)
