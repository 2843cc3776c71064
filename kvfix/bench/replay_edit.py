"""One past edit under replay: what it is like in tokens, and what repairs of it recover and take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvfix import align, metrics
from kvfix.bench.history import PastEdit
from kvfix.core import KVCache, RepairPlan, RowMap, TokenDiff
from kvfix.pipeline.arms import MAX_NEW, Arm, ask_arm
from kvfix.pipeline.measure import Arms, timed_ms
from kvfix.pipeline.quality import judge, room_for, room_of
from kvfix.probes import Probe, auto_probes
from kvfix.selectors import Budget, SelectionContext, Selector, make_plan
from kvfix.selectors.base import largest_plan

if TYPE_CHECKING:
    from kvfix.engine import Engine, StaleEvidence
    from kvfix.engine.text import Encoding

REWRITTEN = 0.9  # a document changed beyond this share is written anew


@dataclass(frozen=True)
class TokenEdit:
    """A past edit in tokens, the context prefix included."""

    edit: PastEdit
    old: Encoding
    new: Encoding
    diff: TokenDiff

    @property
    def num_suffix(self) -> int:
        """Rows from the first span on."""
        return self.diff.num_new - self.diff.first

    @property
    def is_rewritten(self) -> bool:
        """Whether more than nine tenths of the document changed."""
        longer = max(self.diff.num_old, self.diff.num_new) - self.new.num_prefix
        return self.diff.num_changed > REWRITTEN * longer

    def room(self, engine: Engine) -> int | None:
        """Rows that a question may take behind both texts; None: no limit known."""
        limits = [(num, engine.positions.limit_behind(num)) for num in (self.diff.num_old, self.diff.num_new)]
        return min((limit - num for num, limit in limits if limit is not None), default=None)

    def context(self, num_rows: int) -> SelectionContext:
        """What every selector may look at, with `num_rows` a span to spend."""
        old, new = self.old, self.new
        return SelectionContext(
            self.diff, Budget(num_rows), self.edit.after, new.offsets, new.num_prefix, self.edit.before, old.offsets
        )

    def facts(self) -> dict[str, Any]:
        """What the edit is like, JSON-ready; the context prefix is not counted."""
        diff, prefix = self.diff, self.new.num_prefix
        num_old, num_new = diff.num_old - prefix, diff.num_new - prefix
        return {
            "commit": self.edit.commit,
            "doc": self.edit.path,
            "renamed": self.edit.renamed,
            "tokens": {"old": num_old, "new": num_new, "changed": diff.num_changed, "suffix": self.num_suffix},
            "num_spans": len(diff.spans),
            "length_preserving": diff.length_preserving,
            "edit_at": (diff.first - prefix) / num_new,
        }


class Baselines(NamedTuple):
    """Times of bringing the cache up to date without kvfix, the faster of its passes and the model's own."""

    full_prefill_ms: float
    suffix_prefill_ms: float | None  # None: the end of the document was deleted


class Bench:
    """What all repairs of one edit share: the old text's cache, the probes, and the stale and the fresh answers.

    The neutral question has to fit behind both texts.
    The old text's prefill is not timed: it warms up what the timed ones do. Each baseline is timed once.
    """

    def __init__(self, engine: Engine, edit: TokenEdit) -> None:
        self.engine, self.edit = engine, edit
        probes = _probes(engine, edit)
        self.room = room_for(probes)
        self.cache = engine.prefill(edit.old.token_ids, room=self.room)
        arms = self._arms(RepairPlan(edit.diff, np.flatnonzero(edit.diff.source < 0), "", 0))
        prefilled: list[KVCache] = []
        full_ms = timed_ms(engine, lambda: prefilled.append(arms.full(self.room)))
        (fresh,) = prefilled
        self.probes = _continued(engine, fresh, probes)
        self.fresh, self.stale = (ask_arm(engine, cache, self.probes, oracle=True) for cache in (fresh, self.cache))
        self.baselines = self._baselines(arms, fresh, full_ms)

    def plan(self, selector: Selector, num_rows: int) -> tuple[RepairPlan, float]:
        """The rows that a selector takes and the milliseconds it took, the model's part of it included.

        One that looks at the stale rows with a question gets that of the first automatic probe, as in `kvfix edit`,
        or the neutral one.
        """
        context = self.edit.context(num_rows)
        if selector.needs_evidence:
            automatic = (probe for probe in self.probes if probe.kind == "auto")
            asked = next(automatic, neutral_probe(self.engine))
            context = replace(context, query_ids=asked.query_ids, evidence=self._evidence())
        plans: list[RepairPlan] = []
        ms = timed_ms(self.engine, lambda: plans.append(make_plan(selector, context)))
        return plans[0], ms

    def repair(self, plan: RepairPlan, select_ms: float) -> dict[str, Any]:
        """Quality, times and speed-ups of one repair, JSON-ready."""
        arms = self._arms(plan)
        arms.ready(self.room)
        recompute_ms = timed_ms(self.engine, arms.repair)
        repaired = ask_arm(self.engine, arms.finish(), self.probes, oracle=True)
        return {
            "quality": self._quality(repaired),
            "timing_ms": {
                "select": select_ms,
                "recompute": recompute_ms,
                "full_prefill": self.baselines.full_prefill_ms,
                "suffix_prefill": self.baselines.suffix_prefill_ms,
            },
            "speedup": self._speedup(plan, select_ms + recompute_ms),
        }

    def _arms(self, plan: RepairPlan) -> Arms:
        rows = RowMap.of_base(np.arange(self.edit.diff.num_old)).realigned(plan.source())
        return Arms(self.engine, rows, [self.cache], self.edit.new.token_ids, plan)

    def _evidence(self) -> StaleEvidence:
        """The stale rows in the new order; not timed, for a repair has them in memory anyway."""
        from kvfix.engine import StaleEvidence

        engine, diff, token_ids = self.engine, self.edit.diff, self.edit.new.token_ids
        rows = RowMap.of_base(np.arange(diff.num_old)).realigned(diff.stale_source())
        cache = align.aligned(rows, [self.cache], token_ids, self.room, engine.device, engine.rotations)
        stored = partial(align.values_at, RowMap.of_base(np.arange(diff.num_old)), [self.cache])
        return StaleEvidence(engine, cache, diff, stored)

    def _baselines(self, arms: Arms, fresh: KVCache, full_ms: float) -> Baselines:
        """Times, given that of kvfix's own full prefill; the rows of `fresh` are computed once more."""
        engine = self.engine
        full_ms = min(full_ms, _plainly(engine, arms.plain_full))
        if not self.edit.num_suffix:
            return Baselines(full_ms, None)
        prefix = arms.prefix_cache(fresh)
        plain_ms = _plainly(engine, lambda: arms.plain_suffix(prefix))
        return Baselines(full_ms, min(plain_ms, timed_ms(engine, lambda: arms.suffix(fresh))))

    def _speedup(self, plan: RepairPlan, compute_ms: float) -> dict[str, float] | None:
        """Ratios to re-prefilling; None for a repair of nothing."""
        full_ms, suffix_ms = self.baselines
        if suffix_ms is None or len(plan.positions) == 0:
            return None
        return {"compute_vs_full": full_ms / compute_ms, "compute_vs_suffix": suffix_ms / compute_ms}

    def _quality(self, repaired: Arm) -> dict[str, Any]:
        """Figures probe by probe: of the questions that the edit touches, and of the neutral one."""
        found = judge(self.probes, repaired, self.stale, self.fresh, noise=self.engine.noise_nats).probes
        neutral, touched = None, []
        for n, (probe, result) in enumerate(zip(self.probes, found, strict=True)):
            distances = {"kl_stale": self._kl_stale(n), "kl_recovery": result.kl_recovery}
            if probe.kind == "neutral":
                neutral = {"tokens": len(probe.new_ids), **distances}
                continue
            kind = "replaced" if probe.old_ids and probe.new_ids else "inserted" if probe.new_ids else "deleted"
            touched.append(
                {
                    "kind": kind,
                    "mr": result.mr,
                    # without an old or a new text the sign of a margin says nothing
                    "prefers_new": result.prefers_new if kind == "replaced" else None,
                    "flip": result.flip,
                    "flip_fresh": result.flip_fresh,
                    **distances,
                }
            )
        return {"probes": touched, "neutral": neutral}

    def _kl_stale(self, index: int) -> float | None:
        """Nats a token between the fresh and the stale cache; None where it was not measured."""
        fresh, stale = self.fresh.logprobs[index], self.stale.logprobs[index]
        return None if fresh is None or stale is None else metrics.kl_mean(fresh, stale)


def plan_without_model(edit: TokenEdit, selector: Selector, num_rows: int) -> RepairPlan:
    """The rows that a selector takes; as many as it may take where it would choose them with the model."""
    context = edit.context(num_rows)
    return largest_plan(selector, context) if selector.needs_evidence else make_plan(selector, context)


def neutral_probe(engine: Engine) -> Probe:
    """A question that has nothing to do with the edit; its answer will be what the fresh cache says."""
    from kvfix.engine.text import NEUTRAL_QUESTION

    return Probe("neutral", NEUTRAL_QUESTION, engine.text.neutral_ids, "", "", (), ())


def _probes(engine: Engine, edit: TokenEdit) -> list[Probe]:
    """The neutral question, not answered yet, and the automatic probes that fit behind both texts."""
    old, new = edit.old, edit.new
    automatic = auto_probes(
        edit.diff,
        new.token_ids,
        old.token_ids,
        edit.edit.after,
        new.offsets,
        edit.edit.before,
        old.offsets,
        engine.text.plain_ids,
        new.num_prefix,
    )
    room = edit.room(engine)
    return [neutral_probe(engine), *(probe for probe in automatic if room is None or room_of(probe) <= room)]


def _continued(engine: Engine, fresh: KVCache, probes: Sequence[Probe]) -> list[Probe]:
    """The neutral probe with the fresh cache's own greedy continuation as its answer, left out where that is empty."""
    continued = []
    for probe in probes:
        if probe.kind == "neutral":
            (ids,) = engine.generate(fresh, [list(probe.query_ids)], MAX_NEW)
            probe = replace(probe, new=engine.text.decode(ids), new_ids=tuple(ids))
        if probe.new_ids or probe.old_ids:
            continued.append(probe)
    return continued


def _plainly(engine: Engine, work: Callable[[], object]) -> float:
    """Milliseconds of the model's own forward."""
    with engine.plain_attention():
        return timed_ms(engine, work)
