"""Repair: plans carried out, one pass over the weights for all documents that share it; each judged by itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvfix import debt
from kvfix.core import Notify, RepairPlan
from kvfix.errors import LowQualityError
from kvfix.pipeline import measure
from kvfix.pipeline.arms import Arm, Asking, ask_arm, ask_arms
from kvfix.pipeline.behind import Computed
from kvfix.pipeline.clock import shared
from kvfix.pipeline.load import load_cache
from kvfix.pipeline.plan import exactly, plan_repair
from kvfix.pipeline.quality import Quality, judge, make_probes, room_for
from kvfix.pipeline.report import Attempt, EditReport, escalated_to
from kvfix.pipeline.stream import StoredRows, StreamedCache, streamed
from kvfix.pipeline.verdict import lacking, warnings_of

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvfix.core import KVCache
    from kvfix.store import Store, VersionRecord


@dataclass(frozen=True)
class Patch:
    """The rows that a repair computed."""

    positions: np.ndarray  # [M]
    source: np.ndarray  # [N]: the old row of each kept row, -1 where recomputed
    keys: torch.Tensor  # [L, H, M, D], on the CPU
    values: torch.Tensor

    @classmethod
    def of(cls, cache: StreamedCache, plan: RepairPlan) -> Patch:
        """Copies of the rows of a plan."""
        return cls(plan.positions, plan.source(), *cache.taken(plan.positions))

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def recomputed(repairs: Sequence[Repair]) -> list[tuple[Patch, Arm]]:
    """Carry out the plans of several repairs in one pass, and ask the results in as few as they fit.

    The caches of all are in memory meanwhile. The time of a shared pass is shared out: recomputing by rows, asking by
    the tokens asked. Raises what fails for any of them; then nothing has changed, and it may be tried again.
    """
    engine = repairs[0].engine
    # a step of its own, so that reading the weights counts for nothing else
    with repairs[0].clock("model"):
        engine.model  # noqa: B018
    for repair in repairs:
        repair.ask_stale()
    repairs[0].notify(f"recomputing {sum(len(repair.plan.positions) for repair in repairs)} rows")
    with ExitStack() as under_way:
        caches = [under_way.enter_context(repair.streamed()) for repair in repairs]
        with shared("recompute", [(repair.clock, len(repair.plan.positions)) for repair in repairs]):
            engine.recompute_many([(c, repair.plan.positions) for c, repair in zip(caches, repairs, strict=True)])
            patches = [Patch.of(cache, repair.plan) for cache, repair in zip(caches, repairs, strict=True)]
        # a cache that is read ahead may not have been asked for a layer yet
        askings = [repair.asking(cache, patch) for repair, cache, patch in zip(repairs, caches, patches, strict=True)]
    with shared("probes", [(r.clock, asking.num_tokens) for r, asking in zip(repairs, askings, strict=True)]):
        return list(zip(patches, ask_arms(engine, askings), strict=True))


class Repair:
    """One document's repair under way; `plan` is what its next pass carries out."""

    def __init__(self, planned: EditReport, store: Store, notify: Notify) -> None:
        assert planned.change is not None
        assert planned.plan is not None
        self.planned, self.store, self.notify = planned, store, notify
        self.engine, self.options, self.clock = planned.engine, planned.options, planned.clock
        self.record, self.change, self.plan = planned.previous, planned.change, planned.plan
        self.warnings: list[str] = []
        self.probes, self.num_skipped = make_probes(self.engine, self.change, self.options, self.warnings)
        self.room = room_for(self.probes)
        self.stale: Arm | None = None

    # ---- before and in a pass

    def ask_stale(self) -> None:
        """Have the old version's cache answer, once, where there will be an oracle; that also warms the process up."""
        if not self.options.verify or not self.probes or self.stale is not None:
            return
        self.notify("asking the stale cache")
        with self.clock("probes"):
            self.stale = self._ask(load_cache(self.engine, self.change.snapshot, self.room))

    def streamed(self) -> StreamedCache:
        """A cache that brings the rows which the plan reads, aligned, to the pass."""
        rows, snapshot = self.change.snapshot.rows.realigned(self.plan.source()), self.change.snapshot
        stored = StoredRows(self.engine, rows, snapshot, self.clock)
        return streamed(stored, self.change.new.token_ids, self.plan.positions, self.room, whole=self._writes_out)

    @property
    def _writes_out(self) -> bool:
        """Whether answers are decoded token by token, to be compared with an oracle's."""
        return self.options.verify and bool(self.probes)

    @property
    def held_rows(self) -> int:
        """Rows that are in memory at most: of a patch and, unless its layers take turns, of the cache."""
        num_rows, two_layers = self.change.diff.num_new, -(-2 * self.change.diff.num_new // self.change.num_layers)
        return num_rows + (num_rows if self._writes_out else two_layers)

    def asking(self, cache: StreamedCache, patch: Patch) -> Asking:
        """The probes for a cache whose plan is carried out."""
        if self.probes:
            with self.clock("probes"):
                cache = cache.asked(self.room, patch)
        return Asking(cache, self.probes, self.options.verify)

    # ---- behind it

    def ended(self, patch: Patch, repaired: Arm) -> Computed[EditReport]:
        """Judge what a pass has given, with other plans where it will not do, and how to store the last.

        Raises `LowQualityError` where that is asked for.
        """
        fresh = self._ask_fresh() if self.options.verify else None
        quality = self._judge(repaired, fresh)
        attempts = [Attempt.of(self.plan, quality)]
        while (wanted := self._instead(quality)) is not None:
            self.plan = wanted
            ((patch, repaired),) = recomputed([self])
            quality = self._judge(repaired, fresh)
            attempts.append(Attempt.of(self.plan, quality))
            if self.options.on_low != "escalate":
                break
        return self._computed(patch, quality, attempts)

    def _computed(self, patch: Patch, quality: Quality, attempts: Sequence[Attempt]) -> Computed[EditReport]:
        done = self.planned.ended(
            "repaired" if self.plan.strategy == "repair" else "reprefilled",
            self.plan.reason,
            plan=self.plan,
            quality=quality,
            measured=self._measured(),
            changed_bytes=patch.num_bytes,
            warnings=(*self.warnings, *warnings_of(quality)),
            attempts=tuple(attempts),
        )
        record = partial(self._commit, patch, quality, escalated_to(attempts))
        return Computed(lambda: replace(done, record=record()), patch.num_bytes + self._folding_bytes(patch))

    def _measured(self) -> dict | None:
        if not self.options.measure:
            return None
        self.notify(f"timing {measure.ROUNDS} rounds of repair, suffix and full prefill")
        return measure.medians(self.engine, self.change, self.plan)

    def _folding_bytes(self, patch: Patch) -> int:
        """What storing takes besides the patch: all rows, where they are folded into a new base."""
        folds = self.store.should_fold(self.record, len(patch.positions))
        return len(patch.source) * self.record.row_bytes if folds else 0

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

    def _judge(self, repaired: Arm, fresh: Arm | None) -> Quality:
        noise = self.engine.noise_nats
        return judge(self.probes, repaired, self.stale, fresh, noise=noise, num_skipped=self.num_skipped)

    def _instead(self, quality: Quality) -> RepairPlan | None:
        """Another plan where the quality is below the minimum and the user wants exact rows then."""
        said = lacking(quality, self.options)
        if said is None:
            return None
        if self.options.on_low == "fail":
            raise LowQualityError(f"{self.record.doc_id}: {said}; nothing was stored. Raise --k or use --on-low exact")
        start = self.change.exact_until
        if self.options.on_low == "keep" or len(self.plan.positions) >= self.change.diff.num_new - start:
            self.warnings.append(said)
            return None
        larger = self._larger(said) if self.options.on_low == "escalate" else None
        return larger or exactly(self.plan, "suffix", f"{said}: every row that was not exact was recomputed", start)

    def _larger(self, said: str) -> RepairPlan | None:
        """The plan of twice or four times the rows that were asked for; None where neither takes more than `plan`."""
        asked, asked_k = self.options, self.change.rows_a_span(self.options.k)
        for factor in (2, 4):
            k, budget = asked_k * factor, None if asked.budget is None else asked.budget * factor
            if k <= self.plan.k:
                continue
            with self.clock("select"):
                larger = plan_repair(self.engine, self.change, replace(asked, k=k, budget=budget), self.clock)
            if len(larger.positions) > len(self.plan.positions):
                return replace(larger, reason=larger.reason or f"{said}: k was raised to {k}")
        return None

    def _commit(self, patch: Patch, quality: Quality, escalated: int | str | None) -> VersionRecord:
        plan, change = self.plan, self.change
        owed = debt.after_edit(self.record.debt, change.diff, patch.positions)
        report = {"selector": plan.selector, "k": plan.k, "strategy": plan.strategy, "last_mr": quality.mr_median}
        report |= {"prefers_new_rate": quality.prefers_new_rate}
        report |= {"escalated_to": escalated} if escalated is not None else {}
        with self.clock("persist"):
            return self.store.commit_patch(
                change.document,
                self.engine.key,
                change.snapshot,
                patch.source,
                patch.positions,
                patch.keys,
                patch.values,
                change.new.token_ids,
                owed,
                report,
                self.record,
            )
