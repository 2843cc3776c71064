"""Replay past edits: each old text cached, each new one repaired, and what that was worth beside a fresh prefill."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvfix.bench.history import History, PastEdit
from kvfix.bench.records import Records
from kvfix.bench.replay_edit import REWRITTEN, Bench, TokenEdit, neutral_probe, plan_without_model
from kvfix.bench.study import DIAGNOSTIC
from kvfix.core import ADAPTIVE, DEFAULT_SELECTOR, Notify, RepairPlan
from kvfix.cost import cost, rows_a_span
from kvfix.diff import diff_tokens
from kvfix.errors import UsageError
from kvfix.pipeline.quality import room_of
from kvfix.selectors import get_selector
from kvfix.store.jsonfile import plain

if TYPE_CHECKING:
    from kvfix.engine import Engine

SCHEMA = "kvfix.replay/1"


def key_of(record: dict[str, Any]) -> tuple:
    """What no two records of a replay share."""
    return tuple(record[name] for name in ("commit", "doc", "selector", "k", "model"))


@dataclass(frozen=True)
class ReplayOptions:
    """Which repairs to try on how many edits. Raises `UsageError` for values that make no sense."""

    selectors: tuple[str, ...] = (DEFAULT_SELECTOR,)
    ks: tuple[int | str, ...] = (32,)  # rows a span, or "adaptive"
    max_edits: int = 60
    max_tokens: int = 4096  # of a document
    time_budget: float | None = None  # seconds; an edit that has begun is finished
    seed: int = 0
    dry_run: bool = False  # plans alone: no weights are loaded

    def __post_init__(self) -> None:
        for name in self.selectors:
            get_selector(name)
            if name in DIAGNOSTIC:
                raise UsageError(f"selector {name} is a diagnostic: past edits have no answers for it to know")
        for k in self.ks:
            if k != ADAPTIVE and (isinstance(k, str) or k < 0):
                raise UsageError(f"k {k}: expected a number of rows, or {ADAPTIVE}")
        if not self.selectors or not self.ks or self.max_edits < 1:
            raise UsageError("name at least one selector and one k, and at least one edit")

    @property
    def arms(self) -> list[tuple[str, int | str]]:
        """Every selector with every k."""
        return [(selector, k) for selector in self.selectors for k in self.ks]


class Obstacle(NamedTuple):
    """Why a document is not repaired at all."""

    outcome: str  # rewritten or reprefilled
    strategy: str
    reason: str


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
            for past in edits:
                spent = time.monotonic() - begun
                if self.options.time_budget is not None and spent > self.options.time_budget:
                    self.stopped = f"the time budget of {self.options.time_budget:g} s is spent"
                    return
                edit = self._in_tokens(past)
                if edit is None:
                    continue
                num_taken += 1
                self.notify(_progress(num_taken, self.options, spent))
                yield from self._records_of(edit)
                if num_taken == self.options.max_edits:
                    return

    def _in_tokens(self, past: PastEdit) -> TokenEdit | None:
        """The edit in tokens; None where it is counted as skipped."""
        engine = self.engine
        old, new = (engine.text.encode(text) for text in (past.before, past.after))
        longer = max(len(old.token_ids), len(new.token_ids))
        if longer > self.options.max_tokens:
            self.skipped[f"longer than {self.options.max_tokens} tokens"] += 1
        elif old.num_prefix in (len(old.token_ids), len(new.token_ids)):
            self.skipped["from or to an empty document"] += 1
        elif np.array_equal(old.token_ids, new.token_ids):
            self.skipped["the same tokens"] += 1
        else:
            edit = TokenEdit(past, old, new, diff_tokens(old.token_ids, new.token_ids))
            room = edit.room(engine)
            if room is None or room >= room_of(neutral_probe(engine)):
                return edit
            self.skipped["too long for the model and a question"] += 1
        return None

    def _records_of(self, edit: TokenEdit) -> Iterator[dict[str, Any]]:
        """The new records of one edit."""
        obstacle = self._obstacle(edit)
        wanted: Sequence[tuple[str | None, int | str | None]] = [(None, None)] if obstacle else self.options.arms
        bench: Bench | None = None
        for selector, k in wanted:
            body = {"schema": SCHEMA, "kind": "edit", "model": self.engine.key.fingerprint, **edit.facts()}
            body |= {"selector": selector, "k": k}
            record = self.known.find(*key_of(body))
            if record is None:
                if obstacle:
                    body |= _not_repaired(obstacle)
                else:
                    bench = bench or (None if self.options.dry_run else Bench(self.engine, edit))
                    body |= self._repaired(edit, bench, str(selector), k)
                record = plain(body)
                if not self.options.dry_run:
                    self.known.add([record])
                yield record
            self.kept.append(record)

    def _obstacle(self, edit: TokenEdit) -> Obstacle | None:
        diff = edit.diff
        if self.engine.positions.crosses(diff.num_old, diff.num_new):
            reason = "at this length the model's frequencies depend on that of the text"
            return Obstacle("reprefilled", "full", reason)
        moved = diff.source[diff.source >= 0] != np.flatnonzero(diff.source >= 0)
        if not self.engine.movable and bool(np.any(moved)):
            reason = "this model's keys do not simply turn with position, and rows have moved"
            return Obstacle("reprefilled", "suffix", reason)
        if edit.is_rewritten:
            strategy, _ = cost(diff, diff.num_span, edit.new.num_prefix, diff.first).cheaper
            return Obstacle("rewritten", strategy, f"more than {REWRITTEN:.0%} of the document changed")
        return None

    def _repaired(self, edit: TokenEdit, bench: Bench | None, name: str, k: int | str | None) -> dict[str, Any]:
        """The plan, what the cost model would choose and, where there is a bench, what the repair is worth."""
        assert k is not None
        selector = get_selector(name, seed=self.options.seed)
        num_rows = rows_a_span(k, edit.num_suffix, len(edit.diff.spans))
        if bench is None:
            plan = plan_without_model(edit, selector, num_rows)
            worth: dict[str, Any] = dict.fromkeys(("quality", "timing_ms", "speedup"))
        else:
            plan, select_ms = bench.plan(selector, num_rows)
            worth = bench.repair(plan, select_ms)
        return {
            "outcome": "planned" if bench is None else "repaired",
            "reason": None,
            "k_rows": num_rows,
            "repaired_rows": len(plan.positions),
            **_choice(edit, plan),
            **worth,
        }


def _choice(edit: TokenEdit, plan: RepairPlan) -> dict[str, str | None]:
    """What `kvfix edit` would do."""
    strategy, why = cost(edit.diff, len(plan.positions), edit.new.num_prefix, edit.diff.first).cheaper
    return {"chosen": strategy, "chosen_reason": why}


def _not_repaired(obstacle: Obstacle) -> dict[str, Any]:
    unknown = dict.fromkeys(("k_rows", "repaired_rows", "quality", "timing_ms", "speedup"))
    outcome, strategy, reason = obstacle
    return {"outcome": outcome, "reason": reason, **unknown, "chosen": strategy, "chosen_reason": reason}


def _progress(number: int, options: ReplayOptions, spent: float) -> str:
    """`edit 12 of 60, about 3 min left`, by the pace so far or the budget."""
    if number == 1:
        return f"edit 1 of {options.max_edits}"
    left = spent / (number - 1) * (options.max_edits - number + 1)
    if options.time_budget is not None:
        left = min(left, options.time_budget - spent)
    shown = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"edit {number} of {options.max_edits}, about {shown} left"
