"""Linked: short contiguous windows right behind each span and at the places that its words tie to it (ours)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector, windows
from kvfix.selectors.links import linked_places


@dataclass(frozen=True)
class LinkedSelector(Selector):
    """A share of the budget is EditLocal's; the rest goes to linked places, best first, a window each.

    What the places leave goes to the rows behind the spans: without a link this is EditLocal. All windows are
    rebuilt in one pass, in order, so that later ones see the earlier ones repaired.
    """

    name: ClassVar[str] = "linked"
    near: float = 0.25  # share of the budget for the rows right behind the spans, where the model notes the edit
    window: int = 12  # rows a place; one row of a table, or what a sentence says next
    lead: int = 6  # rows before the telling word for which a window still begins with its place

    def select(self, context: SelectionContext) -> np.ndarray:
        ends = [span.new_end for span in context.diff.spans]
        taken = np.zeros(len(context.free), bool)
        taken[windows(context.free, ends, int(self.near * context.num_rows))] = True
        for place, row in linked_places(context):
            left = context.num_rows - int(taken.sum())
            if left <= 0:
                break
            start = place.start if row - place.start <= self.lead else row - 2
            rows = start + np.flatnonzero((context.free & ~taken)[start : place.end])
            taken[rows[: min(self.window, left)]] = True
        left = context.num_rows - int(taken.sum())
        taken[windows(context.free & ~taken, ends, left)] = True
        return np.flatnonzero(taken)
