"""One item on one model: its stale and its fresh cache, and what repairs of the stale one recover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvfix import align, metrics
from kvfix.bench.answers import Answer, Query, ask
from kvfix.bench.caches import copied, equal_until, prefill_behind
from kvfix.bench.insight import Insight
from kvfix.bench.records import DIAGNOSTIC, TRANSPLANT
from kvfix.core import KVCache, RowMap
from kvfix.diff import diff_tokens
from kvfix.errors import DocumentError, UsageError
from kvfix.pipeline.measure import timed_ms
from kvfix.selectors import Budget, SelectionContext, get_selector, make_plan

if TYPE_CHECKING:
    from kvfix.bench.items import Item
    from kvfix.engine import Engine

GROUP_BYTES = 2e9  # of repaired caches in memory together


class Choice(NamedTuple):
    """One way of repairing: a selector's name, or that of a transplant of its rows."""

    selector: str
    k: int
    seed: int = 0

    @property
    def transplants(self) -> bool:
        return self.selector.startswith(TRANSPLANT)


@dataclass(frozen=True)
class Selected:
    """The rows that a choice repairs, or why it has none."""

    choice: Choice
    positions: np.ndarray  # [M], spans included
    select_ms: float | None
    fault: str | None = None

    @property
    def arm(self) -> tuple[bool, bytes]:
        """What is repaired how; equal ones are repaired once."""
        return self.choice.transplants, self.positions.tobytes()


@dataclass(frozen=True)
class Repaired:
    """One repaired cache, judged."""

    margin: float  # nats
    kl_recovery: float | None
    continuation: str
    recompute_ms: float | None  # None: copied from the fresh cache
    upstream_unchanged: bool


class Case:
    """An item's two texts, encoded and prefilled.

    `before` is the cache of an earlier item's old text: the tokens that both begin with are not computed again.
    Raises `DocumentError` for an item that cannot be repaired or does not fit the model.
    """

    def __init__(self, engine: Engine, item: Item, before: KVCache | None = None) -> None:
        self.engine, self.item = engine, item
        self.query = Query.of(engine, item)
        self.old, self.new = engine.encode(item.before), engine.encode(item.after)
        self.old_ids, self.new_ids = self.old.token_ids, self.new.token_ids
        self.diff = diff_tokens(self.old_ids, self.new_ids)
        self.rows = RowMap.of_base(np.arange(len(self.old_ids))).realigned(self.diff.stale_source())
        self._require_repairable()
        self.room = max(self.query.room, len(engine.text.neutral_ids))
        self.stale = prefill_behind(engine, self.old.token_ids, self.room, before)
        prefilled: list[KVCache] = []
        self.full_prefill_ms = timed_ms(engine, lambda: prefilled.append(engine.prefill(self.new_ids, room=self.room)))
        self.fresh = prefilled[0]
        self.of_stale, self.of_fresh = ask(engine, [self.stale, self.fresh], self.query)

    def _require_repairable(self) -> None:
        if not self.diff.spans:
            raise DocumentError("the edit changes no token")
        if self.engine.positions.crosses(self.diff.num_old, self.diff.num_new):
            raise DocumentError("at this length the model's frequencies depend on the length of the text")
        if not self.engine.movable and any(run.delta for run in self.rows.runs()):
            raise DocumentError("this model's keys do not simply turn with position, and rows have moved")
        for num_rows in (self.diff.num_old, self.diff.num_new):
            limit = self.engine.positions.limit_behind(num_rows)
            if limit is not None and num_rows + self.query.longest > limit:
                raise DocumentError(f"no room for {self.query.longest} tokens of question and answer (limit {limit})")

    @property
    def dropped_reason(self) -> str | None:
        """Why no repair of this item says anything, if so."""
        if not self.of_fresh.margin > 0:
            return "fresh wrong"
        gap = metrics.margin_recovery(
            self.of_stale.margin, self.of_fresh.margin, self.of_fresh.margin, self.engine.noise_nats
        )
        return "no margin gap" if gap is None else None

    @property
    def upstream_error(self) -> float:
        """Largest difference of the rows before the edit between the stale and the fresh cache."""
        first = self.diff.first
        pairs = ((self.stale.keys, self.fresh.keys), (self.stale.values, self.fresh.values))
        if not first:
            return 0.0
        return max(float((one[:, :, :first] - other[:, :, :first]).abs().max()) for one, other in pairs)

    @cached_property
    def aligned(self) -> KVCache:
        """The stale rows in the new order, moved keys turned, nothing repaired; rows stored nowhere are zero."""
        engine = self.engine
        return align.aligned(self.rows, [self.stale], self.new_ids, self.room, engine.device, engine.rotations)

    @cached_property
    def insight(self) -> Insight:
        """What selectors may ask of the model."""
        return Insight(self)

    @property
    def drift(self) -> float | None:
        """Mean deviation of the rows behind the edit at the second layer; None for a model of one layer."""
        pool = (self.diff.source >= 0) & (np.arange(len(self.new_ids)) >= self.diff.first)
        if self.fresh.num_layers < 2 or not pool.any():
            return None
        return float(self.insight.deviation(1, "both")[pool].mean())

    # ---- choices

    def outcomes(self, choices: Sequence[Choice]) -> Iterator[tuple[Selected, Repaired | None]]:
        """What each choice repairs and recovers; None for one that cannot choose here. Equal rows are repaired once."""
        selected = [self._select(choice) for choice in choices]
        arms = {one.arm: one for one in selected if one.fault is None}
        repaired = dict(zip(arms, self._repair(list(arms.values())), strict=True))
        for one in selected:
            yield one, repaired.get(one.arm) if one.fault is None else None

    def _select(self, choice: Choice) -> Selected:
        name = choice.selector.removeprefix(TRANSPLANT)
        context = SelectionContext(
            self.diff,
            Budget(choice.k),
            self.item.after,
            self.new.offsets,
            self.new.num_prefix,
            self.item.before,
            self.old.offsets,
            query_ids=tuple(self.query.question),
            evidence=self.insight,
            diagnosis=self.insight if name in DIAGNOSTIC else None,
        )
        selector = get_selector(name, seed=choice.seed)
        plans: list[np.ndarray] = []
        saved_ms = self.insight.saved_ms
        try:
            ms = timed_ms(self.engine, lambda: plans.append(make_plan(selector, context).positions))
        except UsageError as error:
            return Selected(choice, np.empty(0, np.int64), None, error.message)
        return Selected(choice, plans[0], ms + self.insight.saved_ms - saved_ms)

    def _repair(self, arms: list[Selected]) -> Iterator[Repaired]:
        """Each arm's repair of a copy of the aligned cache, a group at a time."""
        base = self.aligned
        size = max(1, int(GROUP_BYTES // (base.capacity * base.row_bytes)))
        for start in range(0, len(arms), size):
            group = arms[start : start + size]
            caches = [copied(base) for _ in group]
            times = [self._renew(cache, arm) for cache, arm in zip(caches, group, strict=True)]
            answers = ask(self.engine, caches, self.query)
            for cache, answer, ms in zip(caches, answers, times, strict=True):
                unchanged = equal_until(self.diff.first, cache, base)
                yield Repaired(answer.margin, self._kl_recovery(answer), answer.continuation, ms, unchanged)

    def _kl_recovery(self, repaired: Answer) -> float | None:
        """Over the new answer's positions; None where that is empty, or where the stale cache is near."""
        fresh, stale = self.of_fresh.logprobs, self.of_stale.logprobs
        if fresh is None or repaired.logprobs is None or stale is None:
            return None
        return metrics.kl_recovery(fresh, repaired.logprobs, stale)

    def _renew(self, cache: KVCache, arm: Selected) -> float | None:
        """Recompute the arm's rows, or copy them from the fresh cache, in place; the milliseconds of the former."""
        positions = arm.positions
        if arm.choice.transplants:
            cache.keys[:, :, positions] = self.fresh.keys[:, :, positions]
            cache.values[:, :, positions] = self.fresh.values[:, :, positions]
            return None
        return timed_ms(self.engine, lambda: self.engine.recompute(cache, positions))
