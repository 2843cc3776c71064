"""A repair end to end: from the stored cache to the durable patch, against storing a fresh cache whole."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix import debt
from kvfix.core import Document
from kvfix.corpus import document_of
from kvfix.pipeline.admission import admit
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.edit import edit
from kvfix.pipeline.measure import ratio_spread, spread
from kvfix.pipeline.plan import EditOptions

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord

STEPS = ("load", "diff", "align", "select", "recompute", "persist")


def end_to_end(engine: Engine, text: str, edits: Sequence[tuple[str, int]], rounds: int) -> list[dict[str, Any]]:
    """Load, diff, align, select, recompute and durable write, against a prefill with the durable write of it all.

    Each edit goes back from `text` to an old one, over a cache that was stored whole, once a round for all edits.
    """
    wholes, ends = list[float](), [_End() for _ in edits]
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as folder:
        from kvfix.store import Store

        with Store.open(Path(folder) / "store", create=True) as store:
            admit(engine, store)
            for _ in range(rounds + 1):
                head, ms = _store_whole(engine, store, document_of(folder, "bench.txt", text))
                wholes.append(ms)
                for end, (old, k) in zip(ends, edits, strict=True):
                    head = end.edited(engine, store, head, (document_of(folder, "bench.txt", old), k))
    return [end.row(wholes[1:]) for end in ends]


@dataclass
class _End:
    """One edit, end to end, in every round."""

    repairs: list[float] = field(default_factory=list)  # ms
    steps: dict[str, float | None] = field(default_factory=dict)  # of the last

    def edited(self, engine: Engine, store: Store, head: VersionRecord, change: tuple[Document, int]) -> VersionRecord:
        """Time the edit, and take it back; the new head, whose content is that of the old one."""
        document, k = change
        options = EditOptions(k=k, strategy="repair", verify=False, auto_probes=False)
        report = edit(engine, store, head, document, options)
        self.steps = report.timing_ms()
        self.repairs.append(self.steps["total"] or 0.0)
        assert report.record is not None
        return store.restore(report.record)

    def row(self, wholes: list[float]) -> dict[str, Any]:
        return {
            "end_to_end_ms": spread(self.repairs[1:]),
            "full_end_to_end_ms": spread(wholes),
            "speedup_end_to_end": ratio_spread(wholes, self.repairs[1:]),
            "last_steps_ms": {name: self.steps[name] for name in STEPS},
        }


def _store_whole(engine: Engine, store: Store, document: Document) -> tuple[VersionRecord, float]:
    """Prefill a document and write all of its cache durably; the milliseconds of both."""
    clock = Clock()
    head = store.head(document.corpus, document.doc_id)
    with clock("whole"):
        cache = engine.prefill(engine.encode(document.text).token_ids)
        record = store.commit_base(document, engine.key, cache, debt.fresh(len(cache)), {}, head)
    return record, clock.ms["whole"]
