"""Evidence of a stored version: its rows are read, and the weights loaded, when a selector first asks for any."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from kvfix import align
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.quality import make_probes
from kvfix.pipeline.stream import StoredRows

if TYPE_CHECKING:
    from kvfix.engine import Engine, StaleEvidence
    from kvfix.pipeline.plan import Change, EditOptions


class StoredEvidence:
    """`Evidence` of a change. What reading the rows takes counts as `load` and `align`, not for whoever asks."""

    def __init__(self, engine: Engine, change: Change, room: int, clock: Clock) -> None:
        self.engine, self.change, self.room, self.clock = engine, change, room, clock

    def query_attention(self, query_ids: tuple[int, ...]) -> np.ndarray:
        """`[N]` fp32. Raises `DocumentError` for a question longer than the `room`."""
        return self._stale.query_attention(query_ids)

    def query_contrast(self, query_ids: tuple[int, ...]) -> np.ndarray:
        """`[N]` fp32. Raises `DocumentError` as `query_attention` does."""
        return self._stale.query_contrast(query_ids)

    def deviation(self, layer: int, of: str) -> np.ndarray:
        """`[N]` fp32."""
        return self._stale.deviation(layer, of)

    def kinship(self, layer: int) -> np.ndarray:
        """`[N]` fp32."""
        return self._stale.kinship(layer)

    @cached_property
    def _stale(self) -> StaleEvidence:
        """The stale rows in the new order."""
        from kvfix.engine import StaleEvidence

        engine, change = self.engine, self.change
        # a step of its own, so that reading the weights counts for nothing else
        with self.clock("model"):
            engine.model  # noqa: B018
        rows = change.snapshot.rows.realigned(change.diff.stale_source())
        with self.clock("load"):
            cache = align.allocate(change.snapshot.segments[0], rows, change.new.token_ids, self.room, engine.device)
        StoredRows(engine, rows, change.snapshot, self.clock).read_all(cache)
        stored = partial(align.values_at, change.snapshot.rows, change.snapshot.segments)
        return StaleEvidence(engine, cache, change.diff, stored)


def question_of(engine: Engine, change: Change, options: EditOptions) -> tuple[int, ...]:
    """The question to look at the rows with, as it will stand behind the document; empty where there is none.

    The one given, else that of the first given probe about the document, else of the first automatic one.
    """
    if options.query is not None:
        return tuple(engine.text.query_ids(options.query))
    probes, _ = make_probes(engine, change, options, [])
    return next((p.query_ids for p in sorted(probes, key=lambda probe: probe.kind != "given")), ())
