"""Asked: linked, and windows at the places that a question looks at more than a neutral question does (ours)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.errors import NoQuestionError
from kvfix.selectors.base import SelectionContext
from kvfix.selectors.linked_selector import LinkedSelector
from kvfix.selectors.links import Place, linked_around, outstanding, places_behind


@dataclass(frozen=True)
class AskedSelector(LinkedSelector):
    """For dependent text that shares no word with the edit: pronouns, roles, paraphrases, a chain's second lookup.

    Places that hold an edited word come first, then those that stand out in `Evidence.query_contrast`, then the other
    linked ones. Costs two passes of a question over the stale rows. Raises `NoQuestionError`, and `UsageError` without
    a model.
    """

    name: ClassVar[str] = "asked"
    needs_evidence: ClassVar[bool] = True
    outstanding: float = 1.5  # robust standard deviations above the median place

    def places(self, context: SelectionContext) -> Iterator[tuple[Place, int]]:
        evidence = context.require_evidence(self)
        if not context.query_ids:
            raise NoQuestionError("selector asked needs a question: give --query, or probes")
        return linked_around(context, self._looked_at(context, evidence.query_contrast(context.query_ids)))

    def _looked_at(self, context: SelectionContext, contrast: np.ndarray) -> Iterator[tuple[Place, int]]:
        """Places behind the edit that the question looks at, by their rows' mean contrast."""
        later = places_behind(context)
        means = np.array([contrast[place.start : place.end].mean() for place in later])
        for index in outstanding(means, self.outstanding):
            yield later[index], later[index].start
