"""What selectors share: the budget, the rows to choose from, contiguous windows, and the plan that comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from kvfix.core import RepairPlan, TokenDiff


@dataclass(frozen=True)
class Budget:
    """`k` rows per span; `cap` bounds the rows of the whole edit (None: no bound). Spans do not count."""

    k: int
    cap: int | None = None

    def rows(self, num_spans: int) -> int:
        """B = k · spans, at most the cap."""
        total = self.k * num_spans
        return total if self.cap is None else min(total, self.cap)


@dataclass(frozen=True)
class SelectionContext:
    """All that a selector may look at: the edited text and the edit's place; never answers or an oracle."""

    diff: TokenDiff
    budget: Budget
    text: str  # the edited document
    offsets: np.ndarray  # [N - num_prefix, 2] characters of its tokens
    num_prefix: int

    @cached_property
    def free(self) -> np.ndarray:
        """`[N]` bool: the downstream pool D - rows after the first span's start, spans excluded."""
        free = self.diff.source >= 0
        free[: self.diff.first] = False
        return free

    @property
    def num_rows(self) -> int:
        """B, the rows to spend besides the spans."""
        return self.budget.rows(len(self.diff.spans))


class Selector(ABC):
    """One policy: `select` names rows of the pool D. `name` is what users type."""

    name: ClassVar[str]

    @abstractmethod
    def select(self, context: SelectionContext) -> np.ndarray:
        """Positions `[A]` int64 out of `context.free`, ascending."""


def windows(free: np.ndarray, starts: list[int], num_rows: int) -> np.ndarray:
    """`num_rows` of the `free` `[N]` rows, shared over contiguous windows that begin at `starts` (ascending).

    Uneven shares give the remainder to the first; a window skips rows that are not free, and what it cannot use
    because another window has the rows goes to the nearest following ones.
    """
    taken = np.zeros(len(free), bool)
    share, rest = divmod(num_rows, len(starts)) if starts else (0, 0)
    for index, start in enumerate(starts):
        wanted = share + (1 if index < rest else 0)
        open_rows = start + np.flatnonzero(free[start:] & ~taken[start:])
        taken[open_rows[:wanted]] = True
    return np.flatnonzero(taken)


def make_plan(selector: Selector, context: SelectionContext) -> RepairPlan:
    """The spans' rows and the selected ones, in order."""
    diff = context.diff
    recompute = diff.source < 0
    if diff.spans:
        recompute[selector.select(context)] = True
    return RepairPlan(diff, np.flatnonzero(recompute), selector.name, context.budget.k)
