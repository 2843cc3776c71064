"""Sync: one pass that brings the caches of whole corpora up to their files; what is done is kept whatever happens.

While the model works on one document, a background thread reads, tokenises and diffs the next two. Nothing else
overlaps: each document is stored before the next is computed, in order, one commit a document. Texts and rows of at
most three documents are in memory at a time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvfix.core import Document, Notify
from kvfix.corpus import UnreadableError, read_document
from kvfix.errors import UsageError
from kvfix.pipeline.ahead import ahead
from kvfix.pipeline.changes import UNCHANGED, Finding, Key, Source, Walk, look
from kvfix.pipeline.clock import Clock, Deadline
from kvfix.pipeline.failures import failure
from kvfix.pipeline.plan import Change, EditOptions, compare

if TYPE_CHECKING:
    import numpy as np

    from kvfix.engine import Engine
    from kvfix.pipeline.report import EditReport
    from kvfix.store import Store, VersionRecord

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
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.verify_sample <= 1:
            raise UsageError(f"the share to verify is a number from 0 to 1, not {self.verify_sample:g}")
        if self.order not in ORDERS:
            raise UsageError(f"unknown order {self.order!r}; there are: {', '.join(ORDERS)}")


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


@dataclass(frozen=True)
class _Ready:
    """A document that was read, tokenised and compared ahead of its turn."""

    document: Document
    head: VersionRecord | None
    clock: Clock
    token_ids: np.ndarray | None = None  # of a new one
    change: Change | None = None  # of a changed one


def sync(
    open_engine: Callable[[], Engine],
    store: Store,
    sources: Sequence[Source],
    options: SyncOptions,
    walk: Walk,
    notify: Notify = lambda line: None,
) -> Iterator[Synced]:
    """Build what is new, repair what has changed, relink what was renamed, name what is gone; one report a document.

    The model is opened when a document needs it. A document that fails is reported and the rest goes on. What the
    time budget leaves undone is noted in the store, and stands first in the next pass. Raises what concerns more than
    one document: `ModelMismatchError`, `UnsupportedModelError`, `StoreBusyError`, `StoreNotWritableError`,
    `UsageError`; what was committed until then stays.
    """
    deadline = Deadline(options.time_budget)
    found = look(store, sources)
    if options.dry_run:
        yield from planned(found)
        return
    work: list[Finding] = []
    for finding in found:
        if finding.kind in ("new", "changed"):
            work.append(finding)
            continue
        done = _or_failed(finding, partial(_without_model, store, finding, options, walk))
        if done is None:
            work.append(replace(finding, kind="new", record=None))
        else:
            yield done
    noted = {source.corpus: store.left(source.corpus) for source in sources}
    work = _ordered(work, [(corpus, doc_id) for corpus in noted for doc_id in noted[corpus]], options.order)
    left: list[Finding] = []
    if work:
        with closing(_Pass(open_engine(), store, options, walk, notify).run(work, deadline, left)) as results:
            yield from results
    for finding in left:
        reason = f"the time budget of {options.time_budget:g} s was spent; it comes first next time"
        yield Synced(*finding.key, "left", reason, finding.record)
    _note_left(store, sources, noted, {finding.key for finding in found}, left)


def planned(found: Iterable[Finding]) -> Iterator[Synced]:
    """What a pass would do, nothing done."""
    outcomes = {"unchanged": "unchanged", "skipped": "skipped", "gone": "removed"}
    for finding in found:
        kept = None if finding.kind == "renamed" else finding.record
        yield Synced(*finding.key, outcomes.get(finding.kind, "planned"), finding.reason, kept)


def _or_failed(finding: Finding, work: Callable[[], Outcome]) -> Outcome | Synced:
    """What `work` returns; what it raises is the document's failure, unless it concerns the whole pass."""
    kept = None if finding.kind == "renamed" else finding.record
    try:
        return work()
    except Exception as error:
        return Synced(*finding.key, *failure(error), kept)


def _without_model(store: Store, finding: Finding, options: SyncOptions, walk: Walk) -> Synced | None:
    """The report of a document that needs no model; None for one renamed whose text has changed since we looked."""
    key, record = finding.key, finding.record
    if finding.kind == "renamed":
        assert record is not None
        document = _read(finding, walk)
        if document is None or document.sha256 != record.text_sha256:
            return None
        return Synced(*key, "relinked", finding.reason, store.relink(record, document), record.doc_id)
    if finding.kind == "gone" and options.prune:
        store.remove(*key)
        return Synced(*key, "pruned", finding.reason)
    outcome = {"unchanged": "unchanged", "skipped": "skipped", "gone": "removed"}[finding.kind]
    return Synced(*key, outcome, finding.reason, record)


def _read(finding: Finding, walk: Walk) -> Document | None:
    try:
        return read_document(os.path.join(*finding.key), finding.corpus, walk.max_bytes)
    except UnreadableError:
        return None


def _ordered(work: list[Finding], first: Sequence[Key], order: str) -> list[Finding]:
    """Those left by the last pass, then as asked for: a wrong answer is worse than none, so changed before new."""
    place = {key: number for number, key in enumerate(first)}

    def rank(finding: Finding) -> tuple:
        late = order == "priority" and finding.kind == "new"
        return place.get(finding.key, len(place)), late, finding.num_chars, finding.key

    return sorted(work, key=rank)


def _note_left(
    store: Store, sources: Sequence[Source], noted: dict[str, list[str]], seen: set[Key], left: Sequence[Finding]
) -> None:
    """Remember what was left; of a corpus that was not looked through, what had been left stays so."""
    whole = {source.corpus for source in sources if source.whole}
    for corpus, before in noted.items():
        now = [finding.doc_id for finding in left if finding.corpus == corpus]
        now += [] if corpus in whole else [doc_id for doc_id in before if (corpus, doc_id) not in seen]
        if now != before:
            store.set_left(corpus, now)


class _Pass:
    """The part of a pass that needs the model."""

    def __init__(self, engine: Engine, store: Store, options: SyncOptions, walk: Walk, notify: Notify) -> None:
        self.engine, self.store, self.options, self.walk, self.notify = engine, store, options, walk, notify
        # exact caches by text: a new document of the same text needs none of its own
        self.twins: dict[str, VersionRecord] = {}

    def run(self, work: Sequence[Finding], deadline: Deadline, left: list[Finding]) -> Generator[Synced]:
        """The reports; findings there was no time for are put into `left`."""
        from kvfix.pipeline.admission import require_key

        # before any row is computed: another model's documents end the pass
        for finding in work:
            if finding.record is not None:
                require_key(self.engine, self.store, finding.record)
        if any(finding.kind == "new" for finding in work):
            for record in self.store.documents():
                self._remember(record)
        with closing(ahead(work, self._prepare)) as prepared:
            for number, (finding, future) in enumerate(prepared):
                if number and deadline.passed:
                    left += work[number:]
                    return
                yield _or_failed(finding, partial(self._bring_up, future))

    def _prepare(self, finding: Finding) -> _Ready:
        """In the background: the file as it is now, and what its head and its tokens make of it."""
        document = read_document(os.path.join(*finding.key), finding.corpus, self.walk.max_bytes)
        head, clock = self.store.head(*finding.key), Clock()
        if head is None:
            return _Ready(document, None, clock, token_ids=self.engine.encode(document.text).token_ids)
        if head.text_sha256 == document.sha256 or head.num_tokens == 0 or not document.text:
            return _Ready(document, head, clock)
        return _Ready(document, head, clock, change=compare(self.engine, self.store, head, document, clock))

    def _bring_up(self, future: Future[_Ready]) -> Synced:
        """Raises what preparing the document raised, and what building or repairing it does."""
        ready = future.result()
        document = ready.document
        self.notify(f"working on {document.doc_id}")
        if ready.head is None:
            done = self._build(ready)
        elif ready.head.text_sha256 == document.sha256:
            return Synced(document.corpus, document.doc_id, "unchanged", UNCHANGED, ready.head)
        else:
            done = self._repair(ready, ready.head)
        if done.record is not None:
            self._remember(done.record)
        return done

    def _build(self, ready: _Ready) -> Synced:
        from kvfix.pipeline.build import build_one

        document = ready.document
        twin = self._twin(document)
        if twin is not None:
            record = self.store.relink(twin, document, keep_old=True)
            reason = f"the text is that of {twin.doc_id}"
            return Synced(document.corpus, document.doc_id, "relinked", reason, record, twin.doc_id)
        assert ready.token_ids is not None
        built = build_one(self.engine, self.store, document, ready.token_ids)
        return Synced(document.corpus, document.doc_id, "built", "new", built.record, timing_ms=built.timing_ms)

    def _repair(self, ready: _Ready, head: VersionRecord) -> Synced:
        from kvfix.pipeline.edit import edit, edit_change

        document = ready.document
        sampled = ready.change is not None and self._is_sampled(document)
        options = replace(
            self.options.edit,
            verify=sampled,
            min_mr=self.options.min_mr if sampled else None,
            on_low="escalate",
        )
        if ready.change is None:
            report = edit(self.engine, self.store, head, document, options, self.notify)
        else:
            report = edit_change(self.engine, self.store, ready.change, options, ready.clock, self.notify)
        key = (document.corpus, document.doc_id)
        return Synced(*key, report.outcome, report.reason, report.record, sampled=sampled, report=report)

    def _is_sampled(self, document: Document) -> bool:
        """Drawn by the document and its text, so that neither the order nor a break changes the sample."""
        seed = f"{self.options.edit.seed}:{document.doc_id}:{document.sha256}"
        return random.Random(seed).random() < self.options.verify_sample

    def _remember(self, record: VersionRecord) -> None:
        if record.stale_rows == 0 and record.num_tokens and record.model == self.engine.key.fingerprint:
            self.twins[record.text_sha256] = record

    def _twin(self, document: Document) -> VersionRecord | None:
        """The head of another document with this text and an exact cache."""
        twin = self.twins.get(document.sha256)
        head = self.store.head(twin.corpus, twin.doc_id) if twin else None
        return head if twin and head and head.record_id == twin.record_id else None
