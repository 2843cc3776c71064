"""Attention: the rows that a question looks at most, over the stale cache (ProphetKV, arXiv 2602.02579)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.errors import NoQuestionError
from kvfix.selectors.base import SelectionContext, Selector, top_rows


@dataclass(frozen=True)
class AttentionSelector(Selector):
    """The B rows of highest `Evidence.query_attention`. Raises `NoQuestionError`, and `UsageError` without a model."""

    name: ClassVar[str] = "attention"
    needs_evidence: ClassVar[bool] = True

    def select(self, context: SelectionContext) -> np.ndarray:
        evidence = context.require_evidence(self)
        if not context.query_ids:
            raise NoQuestionError("selector attention needs a question: give --query, or probes")
        pool = np.flatnonzero(context.free)
        return top_rows(evidence.query_attention(context.query_ids)[pool], pool, context.num_rows)
