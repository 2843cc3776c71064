"""Structure: punctuation and white space next to the spans (arXiv 2609.17983; token rule: code of arXiv 2606.17107)."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from kvfix.diff import slice_text
from kvfix.selectors.base import SelectionContext, Selector

MARKS = frozenset(string.punctuation)


@dataclass(frozen=True)
class StructureSelector(Selector):
    """Tokens without a letter or digit, the nearest to a span first; ties go to the lower position."""

    name: ClassVar[str] = "structure"

    def select(self, context: SelectionContext) -> np.ndarray:
        nearest = islice(self._structural(context), context.num_rows)
        return np.sort(np.fromiter(nearest, np.int64))

    @staticmethod
    def _structural(context: SelectionContext) -> Iterator[int]:
        """Structural rows of the pool, nearest first."""
        pool = np.flatnonzero(context.free)
        order = np.argsort(_distances(context, pool), kind="stable")
        for row in pool[order].tolist():
            token = row - context.num_prefix
            if is_structural(slice_text(context.text, context.offsets, token, token + 1)):
                yield row


def is_structural(token: str) -> bool:
    """Whether a token's text is white space, ASCII punctuation, or both around each other."""
    return MARKS.issuperset(token.strip())


def _distances(context: SelectionContext, rows: np.ndarray) -> np.ndarray:
    """Steps from each of the rows to the nearest span, a neighbour's being 1; none of them lies in a span."""
    found = np.full(len(rows), context.diff.num_new)
    for span in context.diff.spans:
        behind = rows >= span.new_end
        found = np.minimum(found, np.where(behind, rows - span.new_end + 1, span.new_start - rows))
    return found
