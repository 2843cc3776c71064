"""Linked: short contiguous windows right behind each span and at the places that its words tie to it (ours)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector, windows
from kvfix.selectors.links import Place, linked_places


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

    def places(self, context: SelectionContext) -> Iterator[tuple[Place, int]]:
        """Where windows go, best first; each with the row that its window has to hold."""
        return linked_places(context)

    def select(self, context: SelectionContext) -> np.ndarray:
        free, num_rows = context.free.copy(), context.num_rows
        ends = [span.new_end for span in context.diff.spans]
        near = windows(context.free, ends, int(self.near * num_rows))
        free[near] = False
        left = num_rows - len(near)
        for place, row in self.places(context):
            if left <= 0:
                break
            start = place.start if row - place.start <= self.lead else row - 2
            rows = start + np.flatnonzero(free[start : place.end])[: min(self.window, left)]
            free[rows] = False
            left -= len(rows)
        free[near] = True
        linked = np.flatnonzero(context.free & ~free)
        # windows of all that is left hold those of a share of it
        chosen = np.union1d(linked, windows(free, ends, num_rows - len(linked)))
        # where the last window meets the end of the text, EditLocal may still have rows to spend
        missed = np.setdiff1d(windows(context.free, ends, num_rows), chosen)
        return np.union1d(chosen, missed[: num_rows - len(chosen)])
