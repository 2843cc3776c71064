"""The part of a sync that needs the model: documents are read ahead of it, computed in order, and stored behind it.

New documents that are short share a pass. Where a text is cached already, the cache of its twin is linked instead.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvfix.core import Document, Notify
from kvfix.corpus import read_document
from kvfix.pipeline.admission import admit, require_key
from kvfix.pipeline.ahead import ahead
from kvfix.pipeline.behind import Behind, Computed, nothing_to_store
from kvfix.pipeline.build import Built, Job, fits, num_rows, prefill
from kvfix.pipeline.changes import UNCHANGED, Finding, Walk
from kvfix.pipeline.clock import Clock, Deadline
from kvfix.pipeline.edit import compute, compute_change
from kvfix.pipeline.plan import Change, compare
from kvfix.pipeline.synced import Synced, SyncOptions, or_failed
from kvfix.pipeline.twins import Twins

if TYPE_CHECKING:
    import numpy as np

    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord


@dataclass(frozen=True)
class Ready:
    """A document that was read, tokenised and compared ahead of its turn."""

    document: Document
    head: VersionRecord | None
    clock: Clock
    token_ids: np.ndarray | None = None  # none where nothing has to be computed
    change: Change | None = None  # of one that can be repaired


@dataclass(frozen=True)
class New(Job):
    """A new document whose turn has come."""

    finding: Finding

    @classmethod
    def of(cls, finding: Finding, ready: Ready) -> New:
        assert ready.token_ids is not None
        return cls(ready.document, ready.token_ids, None, finding)


class ModelPass:
    """One pass over documents that have to be computed."""

    def __init__(self, engine: Engine, store: Store, options: SyncOptions, walk: Walk, notify: Notify) -> None:
        self.engine, self.store, self.options, self.walk, self.notify = engine, store, options, walk, notify
        self.behind = Behind[Synced](options.memory)
        self.twins = Twins(store, engine.key.fingerprint)
        self.pack: list[New] = []  # those that wait to share a pass

    def run(self, work: Sequence[Finding], deadline: Deadline, left: list[Finding]) -> Generator[Synced]:
        """The reports, in order; findings there was no time for are put into `left`."""
        self._look_around(work)
        with closing(ahead(work, self._prepare)) as prepared, self.behind:
            for number, (finding, future) in enumerate(prepared):
                ready = or_failed(finding, future.result)
                if not self._joins(finding, ready):
                    yield from self._prefilled()
                if number and deadline.passed:
                    left += work[number:]
                    break
                yield from self._take(finding, ready)
                yield from self._told(self.behind.results())
            yield from self._prefilled()
            yield from self._told(self.behind.rest())

    def _look_around(self, work: Sequence[Finding]) -> None:
        """Before any row is computed: another model's documents end the pass."""
        for finding in work:
            if finding.record is not None:
                require_key(self.engine, self.store, finding.record)
        if any(finding.kind == "new" for finding in work):
            for record in self.store.documents():
                self.twins.remember(record)

    # ---- ahead

    def _prepare(self, finding: Finding) -> Ready:
        """In the background: the file as it is now, and what its head and its tokens make of it."""
        document = read_document(os.path.join(*finding.key), finding.corpus, self.walk.max_bytes)
        head, clock = self.store.head(*finding.key), Clock()
        if head is not None and head.text_sha256 == document.sha256:
            return Ready(document, head, clock)
        if head is None or head.num_tokens == 0 or not document.text:
            return Ready(document, head, clock, self.engine.encode(document.text).token_ids)
        change = compare(self.engine, self.store, head, document, clock)
        return Ready(document, head, clock, change.new.token_ids, change)

    # ---- at its turn

    def _joins(self, finding: Finding, ready: Ready | Synced) -> bool:
        """Whether a document can be computed in one pass with the new ones before it."""
        if isinstance(ready, Synced) or ready.head is not None or self.twins.may_have(ready.document):
            return False
        return not self.pack or fits(self.engine, self.pack, New.of(finding, ready), self.behind.most_bytes)

    def _take(self, finding: Finding, ready: Ready | Synced) -> Iterator[Synced]:
        """Have a document computed, now or with others; the results that have come until then."""
        if isinstance(ready, Synced):
            self.behind.hand(nothing_to_store(ready))
        elif ready.head is None:
            yield from self._take_new(finding, ready)
        elif ready.token_ids is None:
            self.behind.hand(nothing_to_store(Synced(*finding.key, "unchanged", UNCHANGED, ready.head)))
        else:
            # the whole cache, and at most as many rows of a patch
            yield from self._room(2 * len(ready.token_ids))
            self.notify(f"working on {finding.doc_id}")
            self.behind.hand(_guarded(finding, partial(self._repaired, finding, ready, ready.head)))

    def _take_new(self, finding: Finding, ready: Ready) -> Iterator[Synced]:
        if self.twins.may_have(ready.document):
            # the cache of its twin may still have to be stored, or be about to be replaced
            yield from self._told(self.behind.rest())
            twin = self.twins.find(ready.document)
            if twin is not None:
                self.behind.hand(Computed(partial(or_failed, finding, partial(self._link, twin, ready.document))))
                return
        admit(self.engine, self.store)
        if ready.document.text:
            self.twins.expect(ready.document)
        self.pack.append(New.of(finding, ready))

    def _prefilled(self) -> Iterator[Synced]:
        """Prefill the documents that wait to share a pass; the results that have come until then."""
        jobs, self.pack = self.pack, []
        if jobs:
            yield from self._room(num_rows(jobs))
            for piece in self._pieces(jobs):
                self.behind.hand(piece)

    def _pieces(self, jobs: Sequence[New]) -> list[Computed[Synced]]:
        """Where a pass over several fails, each is tried by itself: the others are not to suffer for one."""
        first = jobs[0].finding
        self.notify(f"working on {first.doc_id}" + (f" and {len(jobs) - 1} more" if jobs[1:] else ""))
        pieces = or_failed(first, lambda: prefill(self.engine, self.store, jobs))
        if not isinstance(pieces, Synced):
            return [_as_synced(job.finding, piece) for job, piece in zip(jobs, pieces, strict=True)]
        if len(jobs) == 1:
            return [nothing_to_store(pieces)]
        return [piece for job in jobs for piece in self._pieces([job])]

    def _repaired(self, finding: Finding, ready: Ready, head: VersionRecord) -> Computed[Synced]:
        sampled = ready.change is not None and self._is_sampled(ready.document)
        options = replace(
            self.options.edit,
            verify=sampled,
            min_mr=self.options.min_mr if sampled else None,
            on_low="escalate",
        )
        if ready.change is None:
            edited = compute(self.engine, self.store, head, ready.document, options, self.notify)
        else:
            edited = compute_change(self.engine, self.store, ready.change, options, ready.clock, self.notify)

        def commit() -> Synced:
            report = edited.commit()
            return Synced(*finding.key, report.outcome, report.reason, report.record, sampled=sampled, report=report)

        return Computed(commit, edited.num_bytes)

    def _link(self, twin: VersionRecord, document: Document) -> Synced:
        record = self.store.relink(twin, document, keep_old=True)
        reason = f"the text is that of {twin.doc_id}"
        return Synced(document.corpus, document.doc_id, "relinked", reason, record, twin.doc_id)

    def _is_sampled(self, document: Document) -> bool:
        """Drawn by the document and its text, so that neither the order nor a break changes the sample."""
        seed = f"{self.options.edit.seed}:{document.doc_id}:{document.sha256}"
        return random.Random(seed).random() < self.options.verify_sample

    def _room(self, num_rows: int) -> Iterator[Synced]:
        """Wait until so many rows are allowed; the results that have come until then."""
        admit(self.engine, self.store)
        return self._told(self.behind.results(num_rows * self.engine.row_bytes))

    def _told(self, results: Iterator[Synced]) -> Iterator[Synced]:
        for done in results:
            if done.record is not None:
                self.twins.remember(done.record)
            yield done


def _guarded(finding: Finding, work: Callable[[], Computed[Synced]]) -> Computed[Synced]:
    """What `work` computes; what computing or storing it raises is the document's failure."""
    done = or_failed(finding, work)
    if isinstance(done, Synced):
        return nothing_to_store(done)
    return replace(done, commit=partial(or_failed, finding, done.commit))


def _as_synced(finding: Finding, piece: Computed[Built]) -> Computed[Synced]:
    def commit() -> Synced:
        built = piece.commit()
        return Synced(*finding.key, "built", "new", built.record, timing_ms=built.timing_ms)

    return Computed(partial(or_failed, finding, commit), piece.num_bytes)
