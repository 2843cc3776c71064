"""Edit: bring one document's cache up to its new text, and say what that was worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvfix import align, debt
from kvfix.core import Document, Notify, RepairPlan
from kvfix.errors import LowQualityError
from kvfix.pipeline import measure
from kvfix.pipeline.admission import admit, recall, require_key
from kvfix.pipeline.behind import Computed, nothing_to_store
from kvfix.pipeline.build import fresh
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.load import load_cache, read_rows
from kvfix.pipeline.plan import Change, EditOptions, compare, exactly, plan_repair
from kvfix.pipeline.quality import Arm, ProbeResult, Quality, ask_arm, judge, make_probes, room_for
from kvfix.pipeline.report import Attempt, EditReport, escalated_to

if TYPE_CHECKING:
    import torch

    from kvfix.core import KVCache
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord


@dataclass(frozen=True)
class Patch:
    """The rows that a repair computed."""

    positions: np.ndarray  # [M]
    source: np.ndarray  # [N]: the old row of each kept row, -1 where recomputed
    keys: torch.Tensor  # [L, H, M, D], on the CPU
    values: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


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
    record = change.snapshot.record
    blank = EditReport(engine, change.document, options, clock, previous=record)
    if not recall(engine, store) and not options.dry_run:
        admit(engine, store)
    with clock("select"):
        plan = plan_repair(engine, change, options, clock)
    planned = blank.ended("planned", plan.reason or "dry run: nothing was computed or stored", change=change, plan=plan)
    if options.dry_run:
        return nothing_to_store(planned)
    return _Repair(engine, store, record, change, options, clock, notify).run(plan, planned)


def _build_anew(engine: Engine, store: Store, record: VersionRecord, blank: EditReport) -> Computed[EditReport]:
    """From or to an empty document there is nothing to repair."""
    reason = "the document was empty" if record.num_tokens == 0 else "the document is empty now"
    if blank.options.dry_run:
        return nothing_to_store(blank.ended("planned", reason))
    admit(engine, store)
    base = fresh(engine, store, blank.document, record)
    return Computed(lambda: blank.ended("reprefilled", reason, record=base.commit()), base.num_bytes)


class _Repair:
    """One edit under way."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        record: VersionRecord,
        change: Change,
        options: EditOptions,
        clock: Clock,
        notify: Notify,
    ) -> None:
        self.engine, self.store, self.record = engine, store, record
        self.change, self.options, self.clock, self.notify = change, options, clock, notify
        self.warnings: list[str] = []
        self.probes, self.num_skipped = make_probes(engine, change, options, self.warnings)
        self.room = room_for(self.probes)

    def run(self, plan: RepairPlan, planned: EditReport) -> Computed[EditReport]:
        stale = self._ask_stale() if self.options.verify else None
        patch, repaired = self._recompute(plan)
        fresh = self._ask_fresh() if self.options.verify else None
        quality = self._judge(repaired, stale, fresh)
        attempts = [Attempt.of(plan, quality)]
        while (wanted := self._instead(plan, quality)) is not None:
            plan = wanted
            patch, repaired = self._recompute(plan)
            quality = self._judge(repaired, stale, fresh)
            attempts.append(Attempt.of(plan, quality))
            if self.options.on_low != "escalate":
                break
        if self.options.measure:
            self.notify(f"timing {measure.ROUNDS} rounds of repair, suffix and full prefill")
        measured = measure.medians(self.engine, self.change, plan) if self.options.measure else None
        outcome = "repaired" if plan.strategy == "repair" else "reprefilled"
        done = planned.ended(
            outcome,
            plan.reason,
            plan=plan,
            quality=quality,
            measured=measured,
            changed_bytes=patch.num_bytes,
            warnings=(*self.warnings, *_warnings(quality)),
            attempts=tuple(attempts),
        )
        record = partial(self._commit, plan, patch, quality, escalated_to(attempts))
        return Computed(lambda: replace(done, record=record()), patch.num_bytes + self._folding_bytes(patch))

    def _folding_bytes(self, patch: Patch) -> int:
        """What storing takes besides the patch: all rows, where they are folded into a new base."""
        folds = self.store.should_fold(self.record, len(patch.positions))
        return len(patch.source) * self.record.row_bytes if folds else 0

    def _ask_stale(self) -> Arm | None:
        """The old version's cache answers; that also warms the process up for what is timed."""
        if not self.probes:
            return None
        self.notify("asking the stale cache")
        with self.clock("probes"):
            return self._ask(load_cache(self.engine, self.change.snapshot, self.room))

    def _recompute(self, plan: RepairPlan) -> tuple[Patch, Arm]:
        """Gather the rows that the repair reads, align and recompute them; then the rest, and ask the result."""
        self.notify(f"recomputing {len(plan.positions)} rows")
        engine, snapshot, clock = self.engine, self.change.snapshot, self.clock
        source = plan.source()
        rows = snapshot.rows.realigned(source)
        last = int(plan.positions[-1]) + 1 if len(plan.positions) else 0
        with clock("load"):
            ids = self.change.new.token_ids
            cache = align.allocate(snapshot.segments[0], rows, ids, self.room, engine.device)
        read_rows(engine, cache, rows, snapshot, 0, last, clock)
        with clock("recompute"):
            engine.recompute(cache, plan.positions)
            keys, values = (t[:, :, plan.positions].contiguous().cpu() for t in (cache.keys, cache.values))
        with clock("probes"):
            if self.probes:
                read_rows(engine, cache, rows, snapshot, last)
            return Patch(plan.positions, source, keys, values), self._ask(cache)

    def _ask_fresh(self) -> Arm:
        """The oracle: one timed prefill of the new text, and what storing all of it would take."""
        self.notify(f"prefilling {self.change.diff.num_new} tokens to compare")
        with self.clock("full_prefill"):
            cache = self.engine.prefill(self.change.new.token_ids, room=self.room)
        with self.clock("full_persist"):
            self.store.try_write(self.change.document, cache)
        with self.clock("probes"):
            return self._ask(cache)

    def _ask(self, cache: KVCache) -> Arm:
        return ask_arm(self.engine, cache, self.probes, oracle=self.options.verify)

    def _judge(self, repaired: Arm, stale: Arm | None, fresh: Arm | None) -> Quality:
        noise = self.engine.noise_nats
        return judge(self.probes, repaired, stale, fresh, noise=noise, num_skipped=self.num_skipped)

    def _instead(self, plan: RepairPlan, quality: Quality) -> RepairPlan | None:
        """Another plan where the quality is below the minimum and the user wants exact rows then."""
        said = self._low(quality)
        if said is None:
            return None
        if self.options.on_low == "fail":
            raise LowQualityError(f"{self.record.doc_id}: {said}; nothing was stored. Raise --k or use --on-low exact")
        start = self.change.exact_until
        if self.options.on_low == "keep" or len(plan.positions) >= self.change.diff.num_new - start:
            self.warnings.append(said)
            return None
        larger = self._larger(plan, said) if self.options.on_low == "escalate" else None
        return larger or exactly(plan, "suffix", f"{said}: every row that was not exact was recomputed", start)

    def _low(self, quality: Quality) -> str | None:
        """What the quality lacks, for people; None where it will do.

        Where the repair is to escalate, a probe of replaced text that prefers the old answer is not enough, unless
        the fresh cache prefers it too; an MR that cannot be measured is no reason to spend more.
        """
        wanted, found = self.options.min_mr, quality.mr_median
        escalates = self.options.on_low == "escalate"
        if wanted is not None and (found is None or found < wanted) and not (found is None and escalates):
            shown = "not measurable" if found is None else f"{found:.3f}"
            return f"the median MR is {shown}, and at least {wanted:g} was asked for"
        failing = sum(_prefers_old(probe) for probe in quality.probes) if escalates else 0
        return f"{failing} of {len(quality.counting)} probes preferred the old text" if failing else None

    def _larger(self, plan: RepairPlan, said: str) -> RepairPlan | None:
        """The plan of twice or four times the rows that were asked for; None where neither takes more than `plan`."""
        asked, asked_k = self.options, self.change.rows_a_span(self.options.k)
        for factor in (2, 4):
            k, budget = asked_k * factor, None if asked.budget is None else asked.budget * factor
            if k <= plan.k:
                continue
            with self.clock("select"):
                larger = plan_repair(self.engine, self.change, replace(asked, k=k, budget=budget), self.clock)
            if len(larger.positions) > len(plan.positions):
                return replace(larger, reason=larger.reason or f"{said}: k was raised to {k}")
        return None

    def _commit(self, plan: RepairPlan, patch: Patch, quality: Quality, escalated: int | str | None) -> VersionRecord:
        owed = debt.after_edit(self.record.debt, self.change.diff, patch.positions)
        report = {"selector": plan.selector, "k": plan.k, "strategy": plan.strategy, "last_mr": quality.mr_median}
        report |= {"prefers_new_rate": quality.prefers_new_rate}
        report |= {"escalated_to": escalated} if escalated is not None else {}
        with self.clock("persist"):
            return self.store.commit_patch(
                self.change.document,
                self.engine.key,
                self.change.snapshot,
                patch.source,
                patch.positions,
                patch.keys,
                patch.values,
                self.change.new.token_ids,
                owed,
                report,
                self.record,
            )


def _prefers_old(probe: ProbeResult) -> bool:
    """Whether an automatic probe of replaced text still prefers the old one, and a fresh cache is not known to."""
    able = probe.margin_fresh is None or probe.margin_fresh > 0
    return probe.kind == "auto" and bool(probe.old and probe.new) and not probe.prefers_new and able


def _warnings(quality: Quality) -> Sequence[str]:
    """What nobody should overlook."""
    said = []
    counting = quality.counting
    # what a fresh cache gets wrong too is the model's limit, not the repair's
    able = [p for p in counting if p.margin_fresh is None or p.margin_fresh > 0]
    old = sum(not p.prefers_new for p in able)
    if old:
        said.append(f"on {old} of {len(able)} probes the repaired cache still prefers the old text")
    worse = sum(p.mr is not None and p.mr < 0 for p in counting)
    if worse:
        said.append(f"on {worse} of {len(counting)} probes the repaired cache is worse than the stale one")
    return said
