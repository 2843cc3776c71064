"""Boundary: from each span to the end of its Markdown block (EditLocal@∂ of arXiv 2609.17983; blocks are ours)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector
from kvfix.selectors.blocks import block_end


@dataclass(frozen=True)
class BoundarySelector(Selector):
    """No k: the paragraph, list, table or heading section decides. A cap on the whole edit still holds."""

    name: ClassVar[str] = "boundary"

    def select(self, context: SelectionContext) -> np.ndarray:
        chosen = np.zeros(len(context.free), bool)
        for span in context.diff.spans:
            end = block_end(context.text, self._character(context, span.new_start, span.new_end))
            chosen[span.new_end : context.first_token(end)] = True
        rows = np.flatnonzero(chosen & context.free)
        return rows if context.budget.cap is None else rows[: context.budget.cap]

    @staticmethod
    def _character(context: SelectionContext, start: int, end: int) -> int:
        """A character inside the span: its last one, or the one that follows where text was only deleted."""
        tokens = context.offsets
        index = (end - 1 if end > start else start) - context.num_prefix
        if index >= len(tokens):
            return len(context.text)
        return int(tokens[index][1]) - 1 if end > start else int(tokens[index][0])
