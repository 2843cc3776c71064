"""Refresh: full prefills of the documents that are furthest from one, within a time budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvfix.config import DEFAULT_MAX_BYTES
from kvfix.core import Document, Notify
from kvfix.corpus import read_document
from kvfix.errors import UsageError
from kvfix.pipeline.clock import Clock, Deadline
from kvfix.pipeline.failures import failure

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord

NOT_OURS = "run kvfix sync"


@dataclass(frozen=True)
class RefreshOptions:
    """How much to refresh. Raises `UsageError` for values that make no sense."""

    time_budget: float | None = None  # seconds; a document that has begun is finished, and one always begins
    max_documents: int | None = None
    min_debt: int = 1  # stale rows from which a document is refreshed
    max_bytes: int = DEFAULT_MAX_BYTES
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.min_debt < 1 or (self.max_documents is not None and self.max_documents < 1):
            raise UsageError("max and min-debt are numbers from 1 on")


@dataclass(frozen=True)
class Refreshed:
    """What became of one document with debt."""

    before: VersionRecord
    outcome: str  # reprefilled, planned, left, failed; skipped (changed or missing, sync's business; or unreadable)
    reason: str | None = None
    record: VersionRecord | None = None  # the version that stands now
    failing: bool = False  # nobody's business but the user's: unreadable, too long, failed
    timing_ms: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        before, record = self.before, self.record or self.before
        return {
            "schema": "kvfix.refresh/1",
            "doc": before.doc_id,
            "corpus": before.corpus,
            "outcome": self.outcome,
            "reason": self.reason,
            "num_tokens": record.num_tokens,
            "version": record.version,
            "cache_bytes": record.cache_bytes,
            "stored_bytes": record.stored_bytes,
            "debt_before": {"stale_rows": before.stale_rows, "edits_behind": before.edits_behind},
            "debt": {"stale_rows": record.stale_rows, "edits_behind": record.edits_behind},
            "timing_ms": self.timing_ms,
        }


def measure(record: VersionRecord) -> int:
    """What decides the order: stale rows times the edits that the worst of them is behind."""
    return record.stale_rows * max(1, record.edits_behind)


def refresh(
    open_engine: Callable[[], Engine],
    store: Store,
    records: Sequence[VersionRecord],
    options: RefreshOptions,
    notify: Notify = lambda line: None,
) -> Iterator[Refreshed]:
    """Prefill documents with debt anew, most debt first; one report a document, exact ones not mentioned.

    A document whose file has changed or is gone is passed over and does not count. The model is opened for the first
    document that needs it. Raises what `sync` does.
    """
    deadline = Deadline(options.time_budget)
    owing = [record for record in records if record.stale_rows >= options.min_debt]
    owing.sort(key=lambda record: (-measure(record), record.corpus, record.doc_id))
    num_begun = 0
    for record in owing:
        if options.max_documents is not None and num_begun >= options.max_documents:
            yield Refreshed(record, "left", f"{options.max_documents} documents were asked for")
        elif num_begun and deadline.passed:
            yield Refreshed(record, "left", f"the time budget of {options.time_budget:g} s was spent")
        else:
            done = _refreshed(open_engine, store, record, options, notify)
            num_begun += done.outcome in ("reprefilled", "planned")
            yield done


def _refreshed(
    open_engine: Callable[[], Engine], store: Store, record: VersionRecord, options: RefreshOptions, notify: Notify
) -> Refreshed:
    path = os.path.join(record.corpus, record.doc_id)
    if not os.path.lexists(path):
        return Refreshed(record, "skipped", f"its file is gone; {NOT_OURS}")
    try:
        document = read_document(path, record.corpus, options.max_bytes)
        if document.sha256 != record.text_sha256:
            return Refreshed(record, "skipped", f"its file has changed; {NOT_OURS}")
        if options.dry_run:
            return Refreshed(record, "planned", "dry run: nothing was computed or stored")
        notify(f"prefilling {record.doc_id}")
        return _prefilled(open_engine(), store, record, document)
    except Exception as error:
        return Refreshed(record, *failure(error), failing=True)


def _prefilled(engine: Engine, store: Store, record: VersionRecord, document: Document) -> Refreshed:
    from kvfix.pipeline.admission import admit, require_key
    from kvfix.pipeline.build import store_fresh

    require_key(engine, store, record)
    admit(engine, store)
    clock = Clock()
    with clock("total"):
        now = store_fresh(engine, store, document, record)
    return Refreshed(record, "reprefilled", "debt", now, timing_ms=clock.ms)
