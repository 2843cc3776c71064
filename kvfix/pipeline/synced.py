"""What a sync is asked for, and what it says of each document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvfix.errors import UsageError
from kvfix.pipeline.failures import failure
from kvfix.pipeline.packs import REPAIR_ROWS
from kvfix.pipeline.plan import EditOptions

if TYPE_CHECKING:
    from kvfix.pipeline.changes import Finding
    from kvfix.pipeline.report import EditReport
    from kvfix.store import VersionRecord

Outcome = TypeVar("Outcome")

ORDERS = ("priority", "size")
MIN_MR = 0.9


@dataclass(frozen=True)
class SyncOptions:
    """How to go through a corpus. Raises `UsageError` for values that make no sense."""

    edit: EditOptions = field(default_factory=EditOptions)  # what to recompute; what to check is said here
    verify_sample: float = 0.05  # share of the repaired documents that are compared with a fresh prefill
    min_mr: float = MIN_MR  # of a sampled document
    prune: bool = False  # drop what is gone
    order: str = "priority"  # changed before new, small before large; or by size alone
    time_budget: float | None = None  # seconds; a document that has begun is finished, and one always begins
    # bytes of rows that are computed or wait to be stored at a time, but for a document that takes more by itself;
    # None: a quarter of the free memory
    memory: int | None = None
    pack_rows: int = REPAIR_ROWS  # repairs share a pass up to this many rows; 1: one document after another
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.verify_sample <= 1:
            raise UsageError(f"the share to verify is a number from 0 to 1, not {self.verify_sample:g}")
        if self.order not in ORDERS:
            raise UsageError(f"unknown order {self.order!r}; there are: {', '.join(ORDERS)}")
        if self.pack_rows < 1:
            raise UsageError(f"a pass takes a row or more, not {self.pack_rows}")


@dataclass(frozen=True)
class Synced:
    """What became of one document."""

    corpus: str
    doc_id: str
    # built, repaired, reprefilled, relinked, pruned; unchanged; removed (gone, and kept); left (no time); skipped,
    # failed; planned
    outcome: str
    reason: str | None = None
    record: VersionRecord | None = None  # the version that stands now; None where none does
    origin: str | None = None  # the doc_id that a relinked one has its cache from
    sampled: bool = False  # compared with a fresh prefill
    timing_ms: dict[str, float] = field(default_factory=dict)
    report: EditReport | None = None  # of an edit

    def to_json(self) -> dict[str, Any]:
        """The fields of a build and, where the cache was repaired, those of an edit."""
        record = self.record
        edited = self.report.to_json() if self.report else {}
        built = {
            "doc": self.doc_id,
            "corpus": self.corpus,
            "outcome": self.outcome,
            "reason": self.reason,
            "origin": self.origin,
            "num_tokens": record.num_tokens if record else None,
            "version": record.version if record else None,
            "cache_bytes": record.cache_bytes if record else None,
            "stored_bytes": record.stored_bytes if record else None,
            "sampled": self.sampled,
        }
        return {"timing_ms": self.timing_ms, **edited, **built, "schema": "kvfix.sync/1"}


def or_failed(finding: Finding, work: Callable[[], Outcome]) -> Outcome | Synced:
    """What `work` returns; what it raises is the document's failure, unless it concerns the whole pass."""
    kept = None if finding.kind == "renamed" else finding.record
    try:
        return work()
    except Exception as error:
        return Synced(*finding.key, *failure(error), kept)
