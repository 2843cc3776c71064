"""What selectors may ask about an item, computed once for all of them and counted for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfix import align
from kvfix.bench.caches import copied
from kvfix.core import RowMap

if TYPE_CHECKING:
    from kvfix.bench.case import Case
    from kvfix.engine import StaleEvidence, TransplantDiagnosis


class Insight:
    """Evidence and diagnosis of one item (`Evidence` and `Diagnosis` of the selectors).

    What was computed for one selector is there for the next; `saved_ms` adds up what that would have cost, so that
    every selector's time is what it takes alone.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.saved_ms = 0.0
        self._known: dict[Hashable, tuple[Any, float]] = {}

    def query_attention(self, query_ids: tuple[int, ...]) -> np.ndarray:
        return self._once(("attention", query_ids), lambda: self._evidence.query_attention(query_ids))

    def query_contrast(self, query_ids: tuple[int, ...]) -> np.ndarray:
        return self._once(("contrast", query_ids), lambda: self._evidence.query_contrast(query_ids))

    def deviation(self, layer: int, of: str) -> np.ndarray:
        return self._once(("deviation", layer, of), lambda: self._evidence.deviation(layer, of))

    def kinship(self, layer: int) -> np.ndarray:
        return self._once(("kinship", layer), lambda: self._evidence.kinship(layer))

    def transplant_effects(self, positions: np.ndarray) -> np.ndarray:
        return self._once(("effects", positions.tobytes()), lambda: self._diagnosis.transplant_effects(positions))

    def carriers(self) -> list[int]:
        return self._diagnosis.carriers()

    def _once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        if key in self._known:
            found, ms = self._known[key]
            self.saved_ms += ms
            return found
        start = time.perf_counter()
        found = compute()
        # results lie on the CPU: the device has done its work
        self._known[key] = found, (time.perf_counter() - start) * 1e3
        return found

    @cached_property
    def _evidence(self) -> StaleEvidence:
        from kvfix.engine import StaleEvidence

        case = self.case
        removed = partial(align.values_at, RowMap.of_base(np.arange(len(case.old_ids))), [case.stale])
        return StaleEvidence(case.engine, case.aligned, case.diff, removed)

    @cached_property
    def _diagnosis(self) -> TransplantDiagnosis:
        from kvfix.engine import TransplantDiagnosis, Trial, carrier_positions

        case, new, query = self.case, self.case.new, self.case.query
        of_spans = copied(case.aligned)
        case.engine.recompute(of_spans, np.flatnonzero(case.diff.source < 0))
        carriers = carrier_positions(case.item.after, new.offsets, new.num_prefix, case.diff, case.item.new)
        trial = Trial(query.question, query.new, query.old)
        return TransplantDiagnosis(case.engine, of_spans, case.fresh, trial, carriers)
