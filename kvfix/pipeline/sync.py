"""Sync: one pass that brings the caches of whole corpora up to their files; what is done is kept whatever happens.

What needs no model is done first. Then three threads work at once: one reads, tokenises and diffs the next documents,
this one computes, one stores what was computed. Each document is a commit of its own, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from kvfix.core import Notify
from kvfix.pipeline.changes import Finding, Source, Walk, look
from kvfix.pipeline.clock import Deadline
from kvfix.pipeline.settled import note_left, ordered, planned, settled
from kvfix.pipeline.synced import MIN_MR, ORDERS, Synced, SyncOptions

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import Store

__all__ = ["MIN_MR", "ORDERS", "SyncOptions", "Synced", "planned", "sync"]


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
    time budget leaves undone is noted in the store, and stands first in the next pass. A pass that is closed or fails
    stores what it has computed. Raises what concerns more than one document: `ModelMismatchError`,
    `UnsupportedModelError`, `StoreBusyError`, `StoreNotWritableError`, `UsageError`; what was committed until then
    stays.
    """
    deadline = Deadline(options.time_budget)
    found = look(store, sources)
    if options.dry_run:
        yield from planned(found)
        return
    work: list[Finding] = []
    yield from settled(store, found, options, walk, work)
    noted = {source.corpus: store.left(source.corpus) for source in sources}
    work = ordered(work, [(corpus, doc_id) for corpus in noted for doc_id in noted[corpus]], options.order)
    left: list[Finding] = []
    if work:
        from kvfix.pipeline.model_pass import ModelPass

        with closing(ModelPass(open_engine(), store, options, walk, notify).run(work, deadline, left)) as results:
            yield from results
    for finding in left:
        reason = f"the time budget of {options.time_budget:g} s was spent; it comes first next time"
        yield Synced(*finding.key, "left", reason, finding.record)
    note_left(store, sources, noted, {finding.key for finding in found}, left)
