"""Edit: bring one document's cache up to its new text, and say what that was worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix.core import Document, Notify
from kvfix.pipeline.admission import admit, recall, require_key
from kvfix.pipeline.behind import Computed, nothing_to_store
from kvfix.pipeline.build import fresh
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.plan import Change, EditOptions, compare, plan_repair
from kvfix.pipeline.repair import Repair, recomputed
from kvfix.pipeline.report import EditReport

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord


def edit(
    engine: Engine,
    store: Store,
    record: VersionRecord,
    document: Document,
    options: EditOptions | None = None,
    notify: Notify = lambda line: None,
) -> EditReport:
    """Repair the cache of `record` (the document's head) to the text of `document` and commit the result.

    Raises `ModelMismatchError`, `DocumentError` (too long), `NonFiniteError`, `LowQualityError`, and what the store
    raises; in each case the old entry stands.
    """
    return compute(engine, store, record, document, options or EditOptions(), notify).commit()


def compute(
    engine: Engine,
    store: Store,
    record: VersionRecord,
    document: Document,
    options: EditOptions,
    notify: Notify = lambda line: None,
) -> Computed[EditReport]:
    """`edit` as far as its commit, which a writer may make later, in another thread."""
    clock = Clock()
    require_key(engine, store, record)
    blank = EditReport(engine, document, options, clock, previous=record)
    if document.sha256 == record.text_sha256:
        return nothing_to_store(blank.ended("unchanged", "the text is the one that is cached", record=record))
    if record.num_tokens == 0 or not document.text:
        return _build_anew(engine, store, record, blank)
    change = compare(engine, store, record, document, clock)
    return compute_change(engine, store, change, options, clock, notify)


def compute_change(
    engine: Engine, store: Store, change: Change, options: EditOptions, clock: Clock, notify: Notify = lambda line: None
) -> Computed[EditReport]:
    """`compute`, of a change that has been found already; what finding it took stands on the clock."""
    planned = plan_change(engine, store, change, options, clock)
    if options.dry_run:
        return nothing_to_store(planned)
    repair = Repair(planned, store, notify)
    (done,) = recomputed([repair])
    return repair.ended(*done)


def plan_change(engine: Engine, store: Store, change: Change, options: EditOptions, clock: Clock) -> EditReport:
    """A change and its plan, as a dry run reports it; the model is admitted, but for a dry run."""
    blank = EditReport(engine, change.document, options, clock, previous=change.snapshot.record)
    if not recall(engine, store) and not options.dry_run:
        admit(engine, store)
    with clock("select"):
        plan = plan_repair(engine, change, options, clock)
    return blank.ended("planned", plan.reason or "dry run: nothing was computed or stored", change=change, plan=plan)


def _build_anew(engine: Engine, store: Store, record: VersionRecord, blank: EditReport) -> Computed[EditReport]:
    """From or to an empty document there is nothing to repair."""
    reason = "the document was empty" if record.num_tokens == 0 else "the document is empty now"
    if blank.options.dry_run:
        return nothing_to_store(blank.ended("planned", reason))
    admit(engine, store)
    base = fresh(engine, store, blank.document, record)
    return Computed(lambda: blank.ended("reprefilled", reason, record=base.commit()), base.num_bytes)
