"""What a repair is worth: what the stale, the repaired and the fresh cache answered to the same probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvfix import metrics
from kvfix.pipeline.arms import MAX_NEW, Arm
from kvfix.pipeline.load import ROOM_ROWS
from kvfix.probes import Probe, auto_probes, given_probes

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.pipeline.plan import Change, EditOptions


@dataclass(frozen=True)
class ProbeResult:
    """One probe, as reported."""

    kind: str
    question: str
    old: str
    new: str
    margin_stale: float | None
    margin_repaired: float
    margin_fresh: float | None
    mr: float | None
    kl_recovery: float | None
    prefers_new: bool
    flip: bool | None
    flip_fresh: bool | None
    counts: bool  # False: a given probe that this edit does not touch, left out of all summaries


@dataclass(frozen=True)
class Quality:
    """All probes of an edit; figures that were not measured are None."""

    probes: tuple[ProbeResult, ...] = ()
    num_skipped: int = 0  # edited spans beyond the number of automatic probes, or without a lead

    @property
    def mr_median(self) -> float | None:
        return metrics.median(p.mr for p in self.counting)

    @property
    def prefers_new_rate(self) -> float | None:
        return metrics.rate(p.prefers_new for p in self.counting)

    @property
    def counting(self) -> list[ProbeResult]:
        """The probes that this edit touches."""
        return [p for p in self.probes if p.counts]

    @property
    def kept(self) -> list[ProbeResult]:
        """Of those, the ones that the fresh cache answers rightly."""
        return [p for p in self.counting if p.margin_fresh is not None and p.margin_fresh > 0]

    def to_json(self) -> dict[str, Any]:
        """The `quality` object of the report."""
        counting, kept = self.counting, self.kept
        return {
            "num_probes": len(counting),
            "num_untouched": len(self.probes) - len(counting),
            "num_skipped": self.num_skipped,
            "prefers_new_rate": self.prefers_new_rate,
            "flip_rate": metrics.rate(p.flip for p in counting),
            "flip_rate_fresh": metrics.rate(p.flip_fresh for p in counting),
            "mr_median": self.mr_median,
            "mr_mean": metrics.mean(p.mr for p in counting),
            "num_mr": sum(p.mr is not None for p in counting),
            "kl_recovery": metrics.median(p.kl_recovery for p in counting),
            "num_kept": len(kept),
            "mr_median_kept": metrics.median(p.mr for p in kept),
            "flip_rate_kept": metrics.rate(p.flip for p in kept),
            "probes": [asdict(p) for p in self.probes],
        }


def judge(
    probes: Sequence[Probe],
    repaired: Arm,
    stale: Arm | None = None,
    fresh: Arm | None = None,
    *,
    noise: float = 0.0,
    num_skipped: int = 0,
) -> Quality:
    """Compare the arms, probe by probe."""
    results = []
    for n, probe in enumerate(probes):
        margin_stale = stale.margins[n] if stale else None
        margin_fresh = fresh.margins[n] if fresh else None
        mr = metrics.margin_recovery(margin_stale, repaired.margins[n], margin_fresh, noise)
        results.append(
            ProbeResult(
                kind=probe.kind,
                question=probe.question,
                old=probe.old,
                new=probe.new,
                margin_stale=margin_stale,
                margin_repaired=repaired.margins[n],
                margin_fresh=margin_fresh,
                mr=mr,
                kl_recovery=_kl(n, repaired, stale, fresh),
                prefers_new=repaired.margins[n] > 0,
                flip=_flip(n, probe, repaired),
                flip_fresh=_flip(n, probe, fresh),
                counts=probe.kind == "auto" or fresh is None or mr is not None,
            )
        )
    return Quality(tuple(results), num_skipped)


def _kl(n: int, repaired: Arm, stale: Arm | None, fresh: Arm | None) -> float | None:
    if stale is None or fresh is None:
        return None
    of_fresh, of_repaired, of_stale = fresh.logprobs[n], repaired.logprobs[n], stale.logprobs[n]
    if of_fresh is None or of_repaired is None or of_stale is None:
        return None
    return metrics.kl_recovery(of_fresh, of_repaired, of_stale)


def _flip(n: int, probe: Probe, arm: Arm | None) -> bool | None:
    if arm is None or arm.continuations is None:
        return None
    return metrics.flip(arm.continuations[n], probe.new, probe.old)


def room_of(probe: Probe) -> int:
    """Rows that a probe and its answers, or a continuation, take behind a document."""
    return len(probe.query_ids) + max(len(probe.new_ids), len(probe.old_ids), MAX_NEW)


def room_for(probes: Sequence[Probe]) -> int:
    """Rows behind a document for its probes: all at once where that is little, else at least the longest."""
    rooms = [room_of(probe) for probe in probes]
    return max([min(ROOM_ROWS, 2 * sum(rooms)), *rooms], default=0)


def make_probes(engine: Engine, change: Change, options: EditOptions, warnings: list[str]) -> tuple[list[Probe], int]:
    """Automatic probes of a change and the given ones, and how many spans have none.

    Probes that do not fit behind the document are left out with a warning.
    """
    text = engine.text
    given = given_probes(options.probes, change.document.doc_id, text.question_ids, text.plain_ids)
    probes = [*(_automatic(engine, change) if options.auto_probes else ()), *given]
    limits = [(num, engine.positions.limit_behind(num)) for num in (change.diff.num_old, change.diff.num_new)]
    room, limit = min(((limit - num, limit) for num, limit in limits if limit is not None), default=(None, None))
    if room is not None:
        fitting = [p for p in probes if room_of(p) <= room]
        if len(fitting) < len(probes):
            left_out = len(probes) - len(fitting)
            warnings.append(f"{left_out} of {len(probes)} probes do not fit behind the document (limit {limit} tokens)")
        probes = fitting
    return probes, len(change.diff.spans) - sum(p.kind == "auto" for p in probes)


def _automatic(engine: Engine, change: Change) -> list[Probe]:
    old, new = change.old, change.new
    return auto_probes(
        change.diff,
        new.token_ids,
        old.token_ids,
        change.document.text,
        new.offsets,
        change.snapshot.text,
        old.offsets,
        engine.text.plain_ids,
        new.num_prefix,
    )
