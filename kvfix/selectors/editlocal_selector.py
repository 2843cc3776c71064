"""EditLocal: the k rows right after each span (arXiv 2609.17983)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector, windows


@dataclass(frozen=True)
class EditLocalSelector(Selector):
    """Rebuild, in order, what stands right behind the edit: there the model has written its notes about it."""

    name: ClassVar[str] = "editlocal"

    def select(self, context: SelectionContext) -> np.ndarray:
        return windows(context.free, [span.new_end for span in context.diff.spans], context.num_rows)
