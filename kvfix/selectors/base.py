"""What selectors share: the budget, the rows to choose from, contiguous windows, and the plan that comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from kvfix.core import RepairPlan, TokenDiff
from kvfix.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """`k` rows per span; `cap` bounds the rows of the whole edit (None: no bound). Spans do not count."""

    k: int
    cap: int | None = None

    def rows(self, num_spans: int) -> int:
        """B = k · spans, at most the cap."""
        total = self.k * num_spans
        return total if self.cap is None else min(total, self.cap)


class Evidence(Protocol):
    """What the model can tell of the stale rows, in the new order and before anything is repaired; costs passes."""

    def query_attention(self, query_ids: tuple[int, ...]) -> np.ndarray:
        """`[N]` fp32: how much a question behind the document attends to each row, 0 for rows that have no stale state.

        Mean over layers, query tokens and heads of a softmax over the document's keys alone.
        """
        ...

    def query_contrast(self, query_ids: tuple[int, ...]) -> np.ndarray:
        """`[N]` fp32: log of that attention over a neutral question's; 0 where one of the two sees nothing."""
        ...

    def deviation(self, layer: int, of: str) -> np.ndarray:
        """`[N]` fp32: ‖fresh − stale‖² of each row's keys and values at `layer`, heads summed.

        `of` is "keys", "values" or "both". 0 before the edit and for rows that have no stale state.
        """
        ...

    def kinship(self, layer: int) -> np.ndarray:
        """`[N]` fp32: largest cosine of a row's values at `layer` to those of a row that the edit put in or took out.

        All of them as they differ from the mean row; in a model with fewer layers its last. 0 for rows that have no
        stale state.
        """
        ...


class Diagnosis(Protocol):
    """What only a benchmark knows: the fresh cache and the answers. For diagnostic selectors alone."""

    def transplant_effects(self, positions: np.ndarray) -> np.ndarray:
        """`[len(positions)]` fp32: the margin gained when that one row of the stale cache is the fresh one's."""
        ...

    def carriers(self) -> list[int]:
        """Positions after the edit where the new answer's text begins, ascending."""
        ...


@dataclass(frozen=True)
class SelectionContext:
    """All that a selector may look at: the edited text, the edit's place, the question and the stale rows.

    `evidence` is None where there are no weights, `diagnosis` everywhere but in benchmarks; a selector that lacks what
    it needs raises `UsageError`.
    """

    diff: TokenDiff
    budget: Budget
    text: str  # the edited document
    offsets: np.ndarray  # [N - num_prefix, 2] characters of its tokens
    num_prefix: int
    old_text: str = ""  # the document as it was
    old_offsets: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))  # of its tokens
    query_ids: tuple[int, ...] = ()  # the question as it will stand behind the document; empty: none is known
    evidence: Evidence | None = None
    diagnosis: Diagnosis | None = None

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

    def first_token(self, character: int) -> int:
        """The position of the first token that begins at a character of the text or behind it; N where none does."""
        return self.num_prefix + int(np.searchsorted(self.offsets[:, 0], character))

    def require_evidence(self, asking: Selector) -> Evidence:
        """The evidence. Raises `UsageError` where there is none."""
        if self.evidence is None:
            raise UsageError(f"selector {asking.name} looks at the stale rows with the model, and here is none")
        return self.evidence

    def require_diagnosis(self, asking: Selector) -> Diagnosis:
        """The diagnosis. Raises `UsageError` where there is none."""
        if self.diagnosis is None:
            raise UsageError(
                f"selector {asking.name} is a diagnostic: it needs the fresh cache and the answers; "
                "use `kvfix bench items`"
            )
        return self.diagnosis


class Selector(ABC):
    """One policy: `select` names rows of the pool D. `name` is what users type."""

    name: ClassVar[str]
    needs_evidence: ClassVar[bool] = False  # such a one cannot choose without the model; it takes at most B rows

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


def top_rows(scores: np.ndarray, candidates: np.ndarray, num_rows: int) -> np.ndarray:
    """The `num_rows` of the `candidates` (ascending) with the highest scores, ascending; ties go to the lower position.

    `scores[i]` is that of `candidates[i]`.
    """
    return np.sort(candidates[np.argsort(-scores, kind="stable")[:num_rows]])


def largest_plan(selector: Selector, context: SelectionContext) -> RepairPlan:
    """How much a selector that needs evidence may recompute, said without any: B rows, the pool's first for its own."""
    recompute = context.diff.source < 0
    recompute[np.flatnonzero(context.free)[: context.num_rows]] = True
    reason = f"{selector.name} chooses its rows with the model; this is the most that it takes"
    return RepairPlan(context.diff, np.flatnonzero(recompute), selector.name, context.budget.k, reason=reason)


def make_plan(selector: Selector, context: SelectionContext) -> RepairPlan:
    """The spans' rows and the selected ones, in order."""
    diff = context.diff
    recompute = diff.source < 0
    if diff.spans:
        recompute[selector.select(context)] = True
    return RepairPlan(diff, np.flatnonzero(recompute), selector.name, context.budget.k)
