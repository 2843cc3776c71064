"""Asked: linked, and windows at the places that a question looks at more than a neutral question does (ours)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.errors import UsageError
from kvfix.selectors.base import SelectionContext
from kvfix.selectors.linked_selector import LinkedSelector
from kvfix.selectors.links import Place, edited_words, linked_places, places_of


@dataclass(frozen=True)
class AskedSelector(LinkedSelector):
    """For dependent text that shares no word with the edit: pronouns, roles, paraphrases, a chain's second lookup.

    Places that hold an edited word come first, then those that stand out in `Evidence.query_contrast`, then the other
    linked ones. Costs two passes of a question over the stale rows. Raises `UsageError` without a question or a model.
    """

    name: ClassVar[str] = "asked"
    needs_evidence: ClassVar[bool] = True
    outstanding: float = 1.5  # robust standard deviations above the median place

    def places(self, context: SelectionContext) -> Iterator[tuple[Place, int]]:
        evidence = context.require_evidence(self)
        if not context.query_ids:
            raise UsageError("selector asked needs a question: give --query, or probes")
        edited, tied = set.union(*edited_words(context)), list(linked_places(context))
        yield from (link for link in tied if any(word in edited for _, word in link[0].words))
        yield from self._looked_at(context, evidence.query_contrast(context.query_ids))
        yield from tied

    def _looked_at(self, context: SelectionContext, contrast: np.ndarray) -> Iterator[tuple[Place, int]]:
        """Places behind the edit that the question looks at, by their rows' mean contrast."""
        behind = context.diff.spans[0].new_end
        later = [place for place in places_of(context) if place.start >= behind and place.end > place.start]
        means = np.array([contrast[place.start : place.end].mean() for place in later])
        if not len(means):
            return
        median = np.median(means)
        spread = 1.4826 * np.median(np.abs(means - median))
        for index in np.argsort(-means, kind="stable"):
            if means[index] <= median + self.outstanding * spread:
                return
            yield later[index], later[index].start
