"""From a stored version and a new text to the rows that will be recomputed; no weights, unless a selector asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfix.config import ON_LOW, STRATEGIES
from kvfix.core import ADAPTIVE, DEFAULT_SELECTOR, Document, RepairPlan, TokenDiff
from kvfix.cost import Cost, cost, rows_a_span
from kvfix.diff import diff_tokens, span_texts
from kvfix.errors import ModelMismatchError, UsageError
from kvfix.pipeline.admission import require_key
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.evidence import StoredEvidence, question_of
from kvfix.probes import GivenProbe
from kvfix.selectors import Budget, SelectionContext, get_selector, largest_plan, make_plan

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.engine.text import Encoding
    from kvfix.store import Snapshot, Store, VersionRecord


@dataclass(frozen=True)
class EditOptions:
    """How to repair and what to measure. Raises `UsageError` for values that make no sense."""

    selector: str = DEFAULT_SELECTOR
    k: int | str = 32  # rows per span, or "adaptive"
    budget: int | None = None  # cap on the rows of the whole edit, spans not counted
    seed: int = 0
    strategy: str = "auto"  # auto lets the cost model decide
    verify: bool = True  # one timed oracle prefill
    measure: bool = False  # medians, suffix baseline
    min_mr: float | None = None
    on_low: str = "exact"
    dry_run: bool = False
    probes: tuple[GivenProbe, ...] = ()
    auto_probes: bool = True
    query: str | None = None  # what selectors look at the rows with; None: a probe's

    def __post_init__(self) -> None:
        get_selector(self.selector)
        if isinstance(self.k, str) and self.k != ADAPTIVE:
            raise UsageError(f"k is a number of rows or {ADAPTIVE}, not {self.k!r}")
        if (isinstance(self.k, int) and self.k < 0) or (self.budget is not None and self.budget < 0):
            raise UsageError(f"k and budget count rows and cannot be negative (k={self.k}, budget={self.budget})")
        for name, value, known in (("strategy", self.strategy, STRATEGIES), ("on-low", self.on_low, ON_LOW)):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; there are: {', '.join(known)}")
        if self.query is not None and not self.query.strip():
            raise UsageError("the question is empty")
        if self.min_mr is not None and not self.verify:
            raise UsageError("a minimum MR needs the oracle: leave out --no-verify or --min-mr")


@dataclass(frozen=True)
class Change:
    """A document's stored version beside its new text."""

    snapshot: Snapshot
    document: Document
    old: Encoding
    new: Encoding
    diff: TokenDiff

    @property
    def num_layers(self) -> int:
        return self.snapshot.segments[0].keys.shape[0]

    def spans(self) -> list[dict[str, Any]]:
        """The spans in document tokens (the context prefix not counted), with their texts; JSON-ready."""
        prefix = self.new.num_prefix
        old_text, new_text = self.snapshot.text, self.document.text
        texts = span_texts(self.diff, old_text, self.old.offsets, new_text, self.new.offsets, prefix)
        return [
            {
                "old": [span.old_start - prefix, span.old_end - prefix],
                "new": [span.new_start - prefix, span.new_end - prefix],
                "old_text": old,
                "new_text": new,
            }
            for span, (old, new) in zip(self.diff.spans, texts, strict=True)
        ]

    def context(self, budget: Budget) -> SelectionContext:
        """What every selector may look at."""
        new, old = self.new, self.old
        return SelectionContext(
            self.diff, budget, self.document.text, new.offsets, new.num_prefix, self.snapshot.text, old.offsets
        )

    def rows_a_span(self, k: int | str) -> int:
        """What k, a number or `adaptive`, comes to here."""
        return rows_a_span(k, self.diff.num_new - self.diff.first, len(self.diff.spans))

    def cost(self, num_rows: int) -> Cost:
        """What recomputing `num_rows` costs beside re-prefilling."""
        return cost(self.diff, num_rows, self.new.num_prefix, self.exact_until)

    @property
    def exact_until(self) -> int:
        """The rows before this one need no repair: neither this edit nor an earlier one has touched them."""
        return min(self.diff.first, self.snapshot.record.debt.exact_until)


def compare(engine: Engine, store: Store, record: VersionRecord, document: Document, clock: Clock) -> Change:
    """The token diff between a stored version and a text.

    Raises `ModelMismatchError` when another model built the version, or when its text is no longer tokenised as it
    was then; `DocumentError` when the new text is too long.
    """
    require_key(engine, store, record)
    with clock("load"):
        snapshot = store.snapshot(record)
    with clock("diff"):
        new, old = engine.text.encode_all(document.text, snapshot.text)
        engine.require_fit(len(new.token_ids))
        if not np.array_equal(old.token_ids, snapshot.token_ids):
            raise ModelMismatchError(
                f"{record.doc_id}: its stored text gives other tokens than when it was built (another tokenizers "
                "release?); build it again with --force"
            )
        diff = diff_tokens(snapshot.token_ids, new.token_ids)
    return Change(snapshot, document, old, new, diff)


def plan_repair(engine: Engine, change: Change, options: EditOptions, clock: Clock) -> RepairPlan:
    """Select rows, and let the cost model overrule the repair unless a strategy was given.

    A dry run asks the model nothing: for a selector that does, it plans as many rows as it may take. Raises
    `UsageError` when a selector lacks what it needs, `DocumentError` when a question does not fit.
    """
    diff, selector = change.diff, get_selector(options.selector, seed=options.seed)
    k = change.rows_a_span(options.k)
    spans_alone = RepairPlan(diff, np.flatnonzero(diff.source < 0), options.selector, k)
    if not diff.spans:
        return spans_alone
    forced = _forced(engine, change, spans_alone, options)
    if forced is not None:
        return forced
    context = change.context(Budget(k, options.budget))
    if not selector.needs_evidence:
        plan = make_plan(selector, context)
    elif options.dry_run:
        plan = largest_plan(selector, context)
    else:
        query_ids = question_of(engine, change, options)
        room = max(len(query_ids), len(engine.text.neutral_ids))
        evidence = StoredEvidence(engine, change, room, clock)
        plan = make_plan(selector, replace(context, query_ids=query_ids, evidence=evidence))
    return _cheaper(change, plan, options) or plan


def exactly(plan: RepairPlan, strategy: str, reason: str | None, start: int) -> RepairPlan:
    """The plan that recomputes every row from `start` on instead."""
    return replace(plan, positions=np.arange(start, plan.diff.num_new), strategy=strategy, reason=reason)


def _forced(engine: Engine, change: Change, plan: RepairPlan, options: EditOptions) -> RepairPlan | None:
    """Another plan where the model or the user asks for it."""
    diff, prefix = change.diff, change.new.num_prefix
    if engine.positions.crosses(diff.num_old, diff.num_new):
        limit = engine.positions.length_limit
        reason = f"beyond {limit} tokens this model's frequencies depend on the length of the text"
        return exactly(plan, "full", reason, 0)
    if options.strategy == "full":
        return exactly(plan, "full", "strategy full was asked for", prefix)
    if options.strategy == "suffix":
        return exactly(plan, "suffix", "strategy suffix was asked for", diff.first)
    if not engine.movable and _moves(diff):
        reason = "this model's keys do not simply turn with position, and rows have moved"
        return exactly(plan, "suffix", reason, diff.first)
    return None


def _cheaper(change: Change, plan: RepairPlan, options: EditOptions) -> RepairPlan | None:
    """Another plan where the cost asks for it."""
    if options.strategy == "repair" or options.selector == "exact":
        return None
    strategy, why = change.cost(len(plan.positions)).cheaper
    return None if strategy == "repair" else exactly(plan, strategy, why, change.exact_until)


def _moves(diff: TokenDiff) -> bool:
    """Whether any kept row stands at another position than before."""
    kept = diff.source >= 0
    return bool(np.any(diff.source[kept] != np.flatnonzero(kept)))
