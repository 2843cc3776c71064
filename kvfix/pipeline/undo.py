"""Undo: the version before the newest one becomes the newest again; no model is needed, and no file is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfix.pipeline.report import STEPS
from kvfix.pipeline.status import document_status

if TYPE_CHECKING:
    from kvfix.store import Store, VersionRecord


@dataclass(frozen=True)
class Restored:
    """A document that went back by one version, or would."""

    previous: VersionRecord  # the newest version until now
    source: VersionRecord  # what it goes back to
    record: VersionRecord | None  # the newest version now; None for a dry run
    state: str  # exact, repaired, stale (the file says something else) or missing
    model: dict[str, Any]

    @property
    def outcome(self) -> str:
        return "restored" if self.record else "planned"

    @property
    def reason(self) -> str:
        if self.record is None:
            return f"dry run: version {self.source.version} would be restored"
        return f"it holds what version {self.source.version} held"

    @property
    def warnings(self) -> list[str]:
        """What nobody should overlook."""
        if self.state == "stale":
            return [
                "the file says something else than what was restored, so the document is stale: the next edit brings "
                "the file's text back"
            ]
        return ["the file is missing"] if self.state == "missing" else []

    def to_json(self) -> dict[str, Any]:
        """As an edit that computed nothing (`kvfix.edit/1`)."""
        record = self.record or self.previous
        steps = (*STEPS, "total", "probes", "full_prefill", "full_persist", "suffix_prefill")
        return {
            "schema": "kvfix.edit/1",
            "doc": record.doc_id,
            "corpus": record.corpus,
            "outcome": self.outcome,
            "reason": self.reason,
            "model": self.model,
            "selector": None,
            "k": None,
            "strategy": None,
            "length_preserving": None,
            "spans": [],
            "tokens": None,
            "cost": None,
            "quality": None,
            "timing_ms": dict.fromkeys(steps),
            "speedup": dict.fromkeys(("compute_vs_full", "compute_vs_suffix", "end_to_end_vs_full")),
            "measured": None,
            "bytes": {
                "cache_bytes": record.cache_bytes,
                "changed_bytes": None,
                "written_bytes": self.record.written_bytes if self.record else None,
            },
            "version": record.version,
            "restored_version": self.source.version,
            "state": self.state,
            "debt": {"stale_rows": record.debt.stale_rows, "edits_behind": record.debt.edits_behind},
            "escalated_to": None,
            "attempts": [],
            "warnings": self.warnings,
        }


def undo(store: Store, head: VersionRecord, dry_run: bool = False) -> Restored:
    """Commit what the version before `head` holds as its successor.

    Raises `UsageError` if that version is no longer kept, and what the store raises; the old entry then stands.
    """
    source = store.restorable(head)
    record = None if dry_run else store.restore(head)
    key = store.model(source.model)
    model = {"name": key and key.name, "fingerprint": source.model, "dtype": key and key.dtype, "device": None}
    return Restored(head, source, record, document_status(record or source).state, model)
