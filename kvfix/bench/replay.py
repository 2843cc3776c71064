"""Replay past edits: each old text cached, each new one repaired, and what that was worth beside a fresh prefill."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvfix import metrics
from kvfix.bench.history import History, PastEdit
from kvfix.bench.records import Records
from kvfix.core import KVCache, Notify, RepairPlan, RowMap, TokenDiff
from kvfix.cost import adaptive_k, cost
from kvfix.diff import diff_tokens
from kvfix.errors import UsageError
from kvfix.pipeline.measure import Arms, timed_ms
from kvfix.pipeline.quality import MAX_NEW, Arm, ask_arm, judge, room_for, room_of
from kvfix.probes import Probe, auto_probes
from kvfix.selectors import Budget, SelectionContext, get_selector, make_plan
from kvfix.selectors.base import largest_plan
from kvfix.store.jsonfile import plain

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.engine.text import Encoding

SCHEMA = "kvfix.replay/1"
ADAPTIVE = "adaptive"
NEUTRAL = "What does this document say?"
REWRITTEN = 0.9  # a document changed beyond this share is written anew


def key_of(record: dict[str, Any]) -> tuple:
    """What no two records of a replay share."""
    return tuple(record[name] for name in ("commit", "doc", "selector", "k", "model"))


@dataclass(frozen=True)
class ReplayOptions:
    """Which repairs to try on how many edits. Raises `UsageError` for values that make no sense."""

    selectors: tuple[str, ...] = ("editlocal",)
    ks: tuple[int | str, ...] = (32,)  # rows a span, or "adaptive"
    max_edits: int = 60
    max_tokens: int = 4096  # of a document
    time_budget: float | None = None  # seconds; an edit that has begun is finished
    seed: int = 0
    dry_run: bool = False  # plans alone: no weights are loaded

    def __post_init__(self) -> None:
        for name in self.selectors:
            get_selector(name)
        for k in self.ks:
            if k != ADAPTIVE and (isinstance(k, str) or k < 0):
                raise UsageError(f"k {k}: expected a number of rows, or {ADAPTIVE}")
        if not self.selectors or not self.ks or self.max_edits < 1:
            raise UsageError("name at least one selector and one k, and at least one edit")

    @property
    def arms(self) -> list[tuple[str, int | str]]:
        """Every selector with every k."""
        return [(selector, k) for selector in self.selectors for k in self.ks]


@dataclass(frozen=True)
class Case:
    """A past edit in tokens."""

    edit: PastEdit
    old: Encoding
    new: Encoding
    diff: TokenDiff

    @property
    def num_suffix(self) -> int:
        """Rows from the first span on."""
        return self.diff.num_new - self.diff.first

    @property
    def num_changed(self) -> int:
        """Tokens in spans, of the longer side of each."""
        return sum(max(span.num_old, span.num_new) for span in self.diff.spans)

    @property
    def is_rewritten(self) -> bool:
        """Whether more than nine tenths of the document changed."""
        longer = max(self.diff.num_old, self.diff.num_new) - self.new.num_prefix
        return self.num_changed > REWRITTEN * longer

    def facts(self) -> dict[str, Any]:
        """What the edit is like, JSON-ready; the context prefix is not counted."""
        diff, prefix = self.diff, self.new.num_prefix
        num_old, num_new = diff.num_old - prefix, diff.num_new - prefix
        return {
            "commit": self.edit.commit,
            "doc": self.edit.path,
            "renamed": self.edit.renamed,
            "tokens": {"old": num_old, "new": num_new, "changed": self.num_changed, "suffix": self.num_suffix},
            "num_spans": len(diff.spans),
            "length_preserving": diff.length_preserving,
            "edit_at": (diff.first - prefix) / num_new if num_new else 0.0,
        }


class Ground(NamedTuple):
    """What all repairs of one case are compared with."""

    probes: list[Probe]  # the neutral one first, where it fits
    room: int  # rows behind a document for them
    cache: KVCache  # of the old text
    stale: Arm
    fresh: Arm
    full_prefill_ms: float
    suffix_prefill_ms: float | None  # None: the end of the document was deleted


@dataclass
class Replay:
    """A replay under way; `skipped` and `stopped` say what it left out."""

    engine: Engine
    history: History
    options: ReplayOptions
    known: Records = field(default_factory=lambda: Records(None, key_of))  # what an earlier run has made
    notify: Notify = lambda line: None
    skipped: Counter[str] = field(default_factory=Counter)
    stopped: str | None = None
    kept: list[dict[str, Any]] = field(default_factory=list)  # every record of this sample, earlier ones too

    def records(self) -> Iterator[dict[str, Any]]:
        """The records that are new, on disk when they are yielded: one an edit, selector and k."""
        begun, num_taken = time.monotonic(), 0
        with closing(self.history.edits()) as edits:
            for edit in edits:
                spent = time.monotonic() - begun
                if self.options.time_budget is not None and spent > self.options.time_budget:
                    self.stopped = f"the time budget of {self.options.time_budget:g} s is spent"
                    return
                case = self._case(edit)
                if case is None:
                    continue
                num_taken += 1
                self.notify(_progress(num_taken, self.options, spent))
                yield from self._records_of(case)
                if num_taken == self.options.max_edits:
                    return

    def _case(self, edit: PastEdit) -> Case | None:
        """The edit in tokens; None where it is counted as skipped."""
        old, new = (self.engine.text.encode(text) for text in (edit.before, edit.after))
        limit = min(self.options.max_tokens, self.engine.positions.max_tokens or self.options.max_tokens)
        lengths = [len(encoding.token_ids) - encoding.num_prefix for encoding in (old, new)]
        if max(len(old.token_ids), len(new.token_ids)) > limit:
            self.skipped[f"longer than {limit} tokens"] += 1
        elif 0 in lengths:
            self.skipped["from or to an empty document"] += 1
        elif np.array_equal(old.token_ids, new.token_ids):
            self.skipped["the same tokens"] += 1
        else:
            return Case(edit, old, new, diff_tokens(old.token_ids, new.token_ids))
        return None

    def _records_of(self, case: Case) -> Iterator[dict[str, Any]]:
        """The new records of one case."""
        obstacle = self._obstacle(case)
        if obstacle:
            wanted: Sequence[tuple[str | None, int | str | None]] = [(None, None)]
        else:
            wanted = self.options.arms
        ground: Ground | None = None
        for selector, k in wanted:
            model = self.engine.key.fingerprint
            found = self.known.find(case.edit.commit, case.edit.path, selector, k, model)
            if found is not None:
                self.kept.append(found)
                continue
            record = {"schema": SCHEMA, "kind": "edit", "model": model, **case.facts()}
            if selector is None or k is None:
                record |= _not_repaired(case, *obstacle)  # type: ignore[misc]
            else:
                if ground is None and not self.options.dry_run:
                    ground = self._ground(case)
                record |= self._repaired(case, selector, k, ground)
            record = plain(record)
            self.kept.append(record)
            if not self.options.dry_run:
                self.known.add([record])
            yield record

    def _obstacle(self, case: Case) -> tuple[str, str, str] | None:
        """Outcome, strategy and reason where the document is not repaired at all."""
        diff = case.diff
        if self.engine.positions.crosses(diff.num_old, diff.num_new):
            return "reprefilled", "full", "beyond its original length this model's frequencies depend on the text's"
        moved = diff.source[diff.source >= 0] != np.flatnonzero(diff.source >= 0)
        if not self.engine.movable and bool(np.any(moved)):
            return "reprefilled", "suffix", "this model's keys do not simply turn with position, and rows have moved"
        if case.is_rewritten:
            strategy, _ = cost(diff, diff.num_span, case.new.num_prefix, diff.first).cheaper
            return "rewritten", strategy, f"more than {REWRITTEN:.0%} of the document changed"
        return None

    # ---- one repair

    def _repaired(self, case: Case, selector: str, k: int | str, ground: Ground | None) -> dict[str, Any]:
        """Plan and, but for a dry run, repair, time and judge."""
        diff = case.diff
        num_rows = adaptive_k(case.num_suffix, len(diff.spans)) if isinstance(k, str) else k
        plans: list[RepairPlan] = []
        select_ms = timed_ms(self.engine, lambda: plans.append(self._plan(case, selector, num_rows, ground)))
        plan = plans[0]
        strategy, reason = cost(diff, len(plan.positions), case.new.num_prefix, diff.first).cheaper
        record = {
            "outcome": "planned" if ground is None else "repaired",
            "reason": None,
            "selector": selector,
            "k": k,
            "k_rows": num_rows,
            "repaired_rows": len(plan.positions),
            "chosen": strategy,
            "chosen_reason": reason,
            "quality": None,
            "timing_ms": None,
            "speedup": None,
        }
        return record if ground is None else record | self._measured(case, plan, select_ms, ground)

    def _plan(self, case: Case, name: str, num_rows: int, ground: Ground | None) -> RepairPlan:
        selector = get_selector(name, seed=self.options.seed)
        context = SelectionContext(
            case.diff,
            Budget(num_rows),
            case.edit.after,
            case.new.offsets,
            case.new.num_prefix,
            case.new.token_ids,
            case.old.token_ids,
            tuple(self.engine.text.question_ids(NEUTRAL)),
        )
        return (
            largest_plan(selector, context)
            if selector.needs_evidence and ground is None
            else make_plan(selector, context)
        )

    def _measured(self, case: Case, plan: RepairPlan, select_ms: float, ground: Ground) -> dict[str, Any]:
        arms = _arms(self.engine, case, ground.cache, plan)
        arms.ready(ground.room)
        recompute_ms = timed_ms(self.engine, arms.repair)
        repaired = ask_arm(self.engine, arms.finish(), ground.probes, oracle=True)
        return {
            "quality": self._quality(ground, repaired),
            "timing_ms": {
                "select": select_ms,
                "recompute": recompute_ms,
                "full_prefill": ground.full_prefill_ms,
                "suffix_prefill": ground.suffix_prefill_ms,
            },
            "speedup": _speedup(ground, plan, select_ms + recompute_ms),
        }

    def _quality(self, ground: Ground, repaired: Arm) -> dict[str, Any]:
        """Figures probe by probe: of the questions that the edit touches, and of the neutral one."""
        noise = (self.engine.gate_report or {}).get("noise", {}).get("nats", 0.0)
        found = judge(ground.probes, repaired, ground.stale, ground.fresh, noise=noise).probes
        neutral, touched = None, []
        for n, (probe, result) in enumerate(zip(ground.probes, found, strict=True)):
            distances = {"kl_stale": _kl_stale(ground, n), "kl_recovery": result.kl_recovery}
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

    # ---- what it is compared with

    def _ground(self, case: Case) -> Ground:
        """The old text's cache and its answers, a fresh prefill's, and the times of the baselines.

        The first prefill is not timed: it warms up what the timed ones do.
        """
        engine = self.engine
        probes, room = self._probes(case)
        stale_cache = engine.prefill(case.old.token_ids, room=room)
        arms = _arms(engine, case, stale_cache, RepairPlan(case.diff, np.flatnonzero(case.diff.source < 0), "", 0))
        caches: list[KVCache] = []
        full_ms = timed_ms(engine, lambda: caches.append(arms.full(room)))
        cache = caches.pop()
        probes = [_continued(engine, cache, probe) if probe.kind == "neutral" else probe for probe in probes]
        probes = [probe for probe in probes if probe.kind != "neutral" or probe.new_ids]
        fresh = ask_arm(engine, cache, probes, oracle=True)
        suffix_ms = None
        if case.num_suffix:
            suffix_ms = min(timed_ms(engine, lambda: arms.suffix(cache)), _plain_suffix_ms(engine, arms, cache))
        full_ms = min(full_ms, _plainly(engine, arms.plain_full))
        stale = ask_arm(engine, stale_cache, probes, oracle=True)
        return Ground(probes, room, stale_cache, stale, fresh, full_ms, suffix_ms)

    def _probes(self, case: Case) -> tuple[list[Probe], int]:
        """The neutral question, not answered yet, and the automatic probes, as far as they fit behind both texts."""
        old, new, diff, text = case.old, case.new, case.diff, self.engine.text
        neutral = Probe("neutral", NEUTRAL, tuple(text.question_ids(NEUTRAL)), "", "", (), ())
        automatic = auto_probes(
            diff,
            new.token_ids,
            old.token_ids,
            case.edit.after,
            new.offsets,
            case.edit.before,
            old.offsets,
            text.plain_ids,
            new.num_prefix,
        )
        limits = [(num, self.engine.positions.limit_behind(num)) for num in (diff.num_old, diff.num_new)]
        rooms = [limit - num for num, limit in limits if limit is not None]
        probes = [probe for probe in (neutral, *automatic) if all(room_of(probe) <= room for room in rooms)]
        return probes, room_for(probes)


def _not_repaired(case: Case, outcome: str, strategy: str, reason: str) -> dict[str, Any]:
    unknown = dict.fromkeys(("selector", "k", "k_rows", "repaired_rows", "quality", "timing_ms", "speedup"))
    return {"outcome": outcome, "reason": reason, **unknown, "chosen": strategy, "chosen_reason": reason}


def _arms(engine: Engine, case: Case, cache: KVCache, plan: RepairPlan) -> Arms:
    """The ways of bringing the old text's cache up to date."""
    rows = RowMap.of_base(np.arange(case.diff.num_old)).realigned(plan.source())
    return Arms(engine, rows, [cache], case.new.token_ids, plan)


def _speedup(ground: Ground, plan: RepairPlan, compute_ms: float) -> dict[str, float] | None:
    """Ratios to re-prefilling; None for a repair of nothing."""
    if ground.suffix_prefill_ms is None or len(plan.positions) == 0:
        return None
    return {
        "compute_vs_full": ground.full_prefill_ms / compute_ms,
        "compute_vs_suffix": ground.suffix_prefill_ms / compute_ms,
    }


def _continued(engine: Engine, cache: KVCache, probe: Probe) -> Probe:
    """The neutral probe with the fresh cache's own greedy continuation as its answer; empty where it says nothing."""
    (ids,) = engine.generate(cache, [list(probe.query_ids)], MAX_NEW)
    return Probe(probe.kind, probe.question, probe.query_ids, "", engine.text.decode(ids), (), tuple(ids))


def _plainly(engine: Engine, work: Callable[[], object]) -> float:
    """Milliseconds of the model's own forward."""
    with engine.plain_attention():
        return timed_ms(engine, work)


def _plain_suffix_ms(engine: Engine, arms: Arms, cache: KVCache) -> float:
    prefix = arms.prefix_cache(cache)
    return _plainly(engine, lambda: arms.plain_suffix(prefix))


def _kl_stale(ground: Ground, index: int) -> float | None:
    """Nats a token between the fresh and the stale cache; None where it was not measured."""
    fresh, stale = ground.fresh.logprobs[index], ground.stale.logprobs[index]
    return None if fresh is None or stale is None else metrics.kl_mean(fresh, stale)


def _progress(number: int, options: ReplayOptions, spent: float) -> str:
    """`edit 12 of 60, 3 min left`, by the pace so far or the budget."""
    if number == 1:
        return f"edit 1 of {options.max_edits}"
    left = spent / (number - 1) * (options.max_edits - number + 1)
    if options.time_budget is not None:
        left = min(left, options.time_budget - spent)
    return f"edit {number} of {options.max_edits}, {max(left, 0) / 60:.0f} min left"
