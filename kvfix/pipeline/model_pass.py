"""The part of a sync that needs the model: documents are read ahead of it, computed in order, and stored behind it.

New documents that are short share a pass, and so do repairs of few rows. Where a text is cached already, the cache of
its twin is linked instead.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfix.core import Document, Notify
from kvfix.corpus import read_document
from kvfix.pipeline.admission import admit, require_key
from kvfix.pipeline.ahead import ahead
from kvfix.pipeline.behind import Behind, Computed
from kvfix.pipeline.build import limits, prefill
from kvfix.pipeline.changes import UNCHANGED, Finding, Walk
from kvfix.pipeline.clock import Clock, Deadline
from kvfix.pipeline.edit import compute, plan_change
from kvfix.pipeline.packs import held, together
from kvfix.pipeline.plan import Change, EditOptions, compare
from kvfix.pipeline.repair import Repair, recomputed
from kvfix.pipeline.synced import Synced, SyncOptions, or_failed
from kvfix.pipeline.turns import Alone, Changed, New, Turn, guarded, reported
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


class ModelPass:
    """One pass over documents that have to be computed."""

    def __init__(self, engine: Engine, store: Store, options: SyncOptions, walk: Walk, notify: Notify) -> None:
        self.engine, self.store, self.options, self.walk, self.notify = engine, store, options, walk, notify
        self.behind = Behind[Synced](options.memory)
        self.twins = Twins(store, engine.key.fingerprint)
        self.pack: list[New | Changed] = []  # those that wait to share a pass, all of one kind

    def run(self, work: Sequence[Finding], deadline: Deadline, left: list[Finding]) -> Generator[Synced]:
        """The reports, in order; findings there was no time for are put into `left`."""
        self._look_around(work)
        with closing(ahead(work, self._prepare)) as prepared, self.behind:
            for number, (finding, future) in enumerate(prepared):
                turn = yield from self._turn(finding, or_failed(finding, future.result))
                if not self._joins(turn):
                    yield from self._computed()
                if number and deadline.passed:
                    left += work[number:]
                    break
                yield from self._take(turn)
                yield from self._told(self.behind.results())
            yield from self._computed()
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

    def _turn(self, finding: Finding, ready: Ready | Synced) -> Generator[Synced, None, Turn]:
        """What there is to do about a document; meanwhile the results that have come."""
        if isinstance(ready, Synced):
            return Alone.known(finding, ready)
        if ready.token_ids is None:
            return Alone.known(finding, Synced(*finding.key, "unchanged", UNCHANGED, ready.head))
        if ready.head is None:
            return New(ready.document, ready.token_ids, None, finding)
        if ready.change is None:
            return Alone(finding, partial(self._anew, finding, ready.head, ready.document), len(ready.token_ids))
        # a selector may look at the stale cache
        yield from self._room(len(ready.token_ids))
        planned = or_failed(finding, partial(self._planned, finding, ready.change, ready.clock))
        return Alone.known(finding, planned) if isinstance(planned, Synced) else planned

    def _planned(self, finding: Finding, change: Change, clock: Clock) -> Changed:
        sampled = self._is_sampled(change.document)
        planned = plan_change(self.engine, self.store, change, self._options(sampled), clock)
        return Changed(finding, Repair(planned, self.store, self.notify), sampled)

    def _anew(self, finding: Finding, head: VersionRecord, document: Document) -> Computed[Synced]:
        """From or to an empty document."""
        self.notify(f"working on {finding.doc_id}")
        edited = compute(self.engine, self.store, head, document, self._options(sampled=False), self.notify)
        return reported(finding, edited, sampled=False)

    def _options(self, sampled: bool) -> EditOptions:
        min_mr = self.options.min_mr if sampled else None
        return replace(self.options.edit, verify=sampled, min_mr=min_mr, on_low="escalate")

    def _is_sampled(self, document: Document) -> bool:
        """Drawn by the document and its text, so that neither the order nor a break changes the sample."""
        seed = f"{self.options.edit.seed}:{document.doc_id}:{document.sha256}"
        return random.Random(seed).random() < self.options.verify_sample

    def _joins(self, turn: Turn) -> bool:
        """Whether a document can be computed in one pass with those that wait."""
        if isinstance(turn, Alone) or (isinstance(turn, New) and self.twins.may_have(turn.document)):
            return False
        most = limits(self.engine, self.behind.most_bytes)
        most = replace(most, num_rows=self.options.pack_rows) if isinstance(turn, Changed) else most
        return all(type(one) is type(turn) for one in self.pack) and most.allow(self.pack, turn)

    def _take(self, turn: Turn) -> Iterator[Synced]:
        """Have a document computed, now or with others; the results that have come until then."""
        if isinstance(turn, New):
            yield from self._take_new(turn)
        elif isinstance(turn, Changed):
            self.pack.append(turn)
        else:
            if turn.held_rows:
                yield from self._room(turn.held_rows)
            self.behind.hand(guarded(turn.finding, turn.compute))

    def _take_new(self, new: New) -> Iterator[Synced]:
        if self.twins.may_have(new.document):
            # the cache of its twin may still have to be stored, or be about to be replaced
            yield from self._told(self.behind.rest())
            twin = self.twins.find(new.document)
            if twin is not None:
                self.behind.hand(Computed(partial(or_failed, new.finding, partial(self._link, twin, new.document))))
                return
        admit(self.engine, self.store)
        if new.document.text:
            self.twins.expect(new.document)
        self.pack.append(new)

    # ---- in a pass

    def _computed(self) -> Iterator[Synced]:
        """Compute the documents that wait to share a pass; the results that have come until then."""
        pack, self.pack = self.pack, []
        if pack:
            yield from self._room(held(pack))
            for turn, done in zip(pack, together(pack, self._pass), strict=True):
                self.behind.hand(guarded(turn.finding, partial(_synced, turn, done)))

    def _pass(self, pack: Sequence[New | Changed]) -> Sequence[Any]:
        """What the pass gives for each document, all of one kind, as its `synced` takes it."""
        more = f" and {len(pack) - 1} more" if pack[1:] else ""
        self.notify(f"working on {pack[0].finding.doc_id}{more}")
        repairs = [turn.repair for turn in pack if isinstance(turn, Changed)]
        return recomputed(repairs) if repairs else prefill(self.engine, self.store, pack)  # type: ignore[arg-type]

    def _link(self, twin: VersionRecord, document: Document) -> Synced:
        record = self.store.relink(twin, document, keep_old=True)
        reason = f"the text is that of {twin.doc_id}"
        return Synced(document.corpus, document.doc_id, "relinked", reason, record, twin.doc_id)

    def _room(self, num_rows: int) -> Iterator[Synced]:
        """Wait until so many rows are allowed; the results that have come until then."""
        admit(self.engine, self.store)
        return self._told(self.behind.results(num_rows * self.engine.row_bytes))

    def _told(self, results: Iterator[Synced]) -> Iterator[Synced]:
        for done in results:
            if done.record is not None:
                self.twins.remember(done.record)
            yield done


def _synced(turn: New | Changed, done: Future[Any]) -> Computed[Synced]:
    """Raises what the pass raised for the document alone."""
    return turn.synced(done.result())
