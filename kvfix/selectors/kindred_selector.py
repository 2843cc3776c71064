"""Kindred: linked, and windows at places that speak of what was edited in other words (ours)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext
from kvfix.selectors.linked_selector import LinkedSelector
from kvfix.selectors.links import Place, linked_around, outstanding, places_behind


@dataclass(frozen=True)
class KindredSelector(LinkedSelector):
    """For dependent text that names neither the old nor the new value but what they are: a kind, a paraphrase.

    Places that hold an edited word come first, then those with a row that stands out in `Evidence.kinship`, then the
    other linked ones. Needs no question. Costs a pass of the spans through the lower layers. Raises `UsageError`
    without a model.
    """

    name: ClassVar[str] = "kindred"
    needs_evidence: ClassVar[bool] = True
    layer: int = 3  # at layer 0 values know the token alone, in the middle their whole surroundings
    outstanding: float = 1.5  # robust standard deviations above the median place

    def places(self, context: SelectionContext) -> Iterator[tuple[Place, int]]:
        return linked_around(context, self._akin(context, context.require_evidence(self).kinship(self.layer)))

    def _akin(self, context: SelectionContext, kinship: np.ndarray) -> Iterator[tuple[Place, int]]:
        """Places behind the edit by their rows' largest kinship, each with that row."""
        later = places_behind(context)
        peaks = [place.start + int(np.argmax(kinship[place.start : place.end])) for place in later]
        for index in outstanding(kinship[np.array(peaks, np.int64)], self.outstanding):
            yield later[index], peaks[index]
