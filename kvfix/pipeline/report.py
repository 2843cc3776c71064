"""What an edit reports: one object, one JSON document (`kvfix.edit/1`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvfix.core import Document, RepairPlan
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.plan import Change, EditOptions
from kvfix.pipeline.quality import Quality

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import VersionRecord

STEPS = ("load", "diff", "align", "select", "recompute", "persist")
COMPUTE = ("align", "select", "recompute")


@dataclass(frozen=True)
class Attempt:
    """One plan that was carried out, and what it was worth; the last one was stored."""

    k: int
    strategy: str
    num_rows: int
    mr_median: float | None
    prefers_new_rate: float | None

    @classmethod
    def of(cls, plan: RepairPlan, quality: Quality) -> Attempt:
        return cls(plan.k, plan.strategy, len(plan.positions), quality.mr_median, quality.prefers_new_rate)


def escalated_to(attempts: Sequence[Attempt]) -> int | str | None:
    """The k, or `exact`, that a repair ended with; None where the first attempt was good enough."""
    if len(attempts) < 2:
        return None
    return attempts[-1].k if attempts[-1].strategy == "repair" else "exact"


@dataclass(frozen=True)
class EditReport:
    """The outcome of one edit; whatever was not measured is None."""

    engine: Engine
    document: Document
    options: EditOptions
    clock: Clock
    previous: VersionRecord
    outcome: str = "failed"  # repaired, reprefilled, unchanged, planned
    reason: str | None = None
    change: Change | None = None
    plan: RepairPlan | None = None
    quality: Quality | None = None
    measured: dict[str, Any] | None = None
    record: VersionRecord | None = None
    changed_bytes: int | None = None
    warnings: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()

    def ended(self, outcome: str, reason: str | None, **more: Any) -> EditReport:
        """The report with its outcome."""
        return replace(self, outcome=outcome, reason=reason, **more)

    def timing_ms(self) -> dict[str, float | None]:
        """By step; of a pass that several documents shared, this one's share."""
        ms = self.clock.ms
        times: dict[str, float | None] = {step: ms.get(step) for step in STEPS}
        times["total"] = sum(ms.get(step, 0.0) for step in STEPS) if "recompute" in ms else None
        times |= {step: ms.get(step) for step in ("probes", "full_prefill", "full_persist")}
        times["suffix_prefill"] = self.measured["suffix_prefill_ms"]["median"] if self.measured else None
        return times

    def speedup(self) -> dict[str, float | None]:
        """Ratios to re-prefilling; medians where they were measured."""
        ms = self.clock.ms
        full, persist, total = ms.get("full_prefill"), ms.get("full_persist"), self.timing_ms()["total"]
        if self.plan is None or len(self.plan.positions) == 0:
            return {"compute_vs_full": None, "compute_vs_suffix": None, "end_to_end_vs_full": None}
        compute = sum(ms.get(step, 0.0) for step in COMPUTE)
        if self.measured:
            vs_full = self.measured["speedup_full"]["median"]
            vs_suffix = self.measured["speedup_suffix"]["median"]
        else:
            vs_full, vs_suffix = (full / compute if full and compute and "recompute" in ms else None), None
        whole = (full + persist) / total if full and persist and total else None
        return {"compute_vs_full": vs_full, "compute_vs_suffix": vs_suffix, "end_to_end_vs_full": whole}

    def tokens(self) -> dict[str, int] | None:
        """Counts without the context prefix."""
        if self.change is None or self.plan is None:
            return None
        diff, prefix = self.change.diff, self.change.new.num_prefix
        return {
            "old": diff.num_old - prefix,
            "new": diff.num_new - prefix,
            "span": diff.num_span,
            "recomputed": len(self.plan.positions),
            "token_layers": self.plan.token_layers(self.change.num_layers),
        }

    def to_json(self) -> dict[str, Any]:
        """The document of `kvfix edit --json`."""
        record, change, plan = self.record or self.previous, self.change, self.plan
        return {
            "schema": "kvfix.edit/1",
            "doc": self.document.doc_id,
            "corpus": self.document.corpus,
            "outcome": self.outcome,
            "reason": self.reason,
            "model": self.engine.describe(),
            "selector": self.options.selector,
            "k": plan.k if plan else self.options.k if isinstance(self.options.k, int) else None,
            "strategy": plan.strategy if plan else None,
            "length_preserving": change.diff.length_preserving if change else None,
            "spans": change.spans() if change else [],
            "tokens": self.tokens(),
            "cost": vars(change.cost(len(plan.positions))) if change and plan else None,
            "quality": self.quality.to_json() if self.quality else None,
            "timing_ms": self.timing_ms(),
            "speedup": self.speedup(),
            "measured": self.measured,
            "bytes": {
                "cache_bytes": record.cache_bytes,
                "changed_bytes": self.changed_bytes,
                "written_bytes": self.record.written_bytes if self.changed_bytes is not None and self.record else None,
            },
            "version": record.version,
            "debt": {"stale_rows": record.debt.stale_rows, "edits_behind": record.debt.edits_behind},
            "escalated_to": escalated_to(self.attempts),
            "attempts": [vars(attempt) for attempt in self.attempts],
            "warnings": list(self.warnings),
        }
