"""Latency of a repair against full and suffix re-prefill, and end to end through a real store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvfix.bench.end_to_end import end_to_end
from kvfix.bench.roofline import Roofline
from kvfix.bench.texts import Texts, allowed_error, distance, plan_of, versions
from kvfix.core import Notify, RowMap
from kvfix.errors import KVFixError, UsageError
from kvfix.pipeline.measure import ROUNDS, Arms, compare_all

if TYPE_CHECKING:
    from kvfix.core import KVCache
    from kvfix.engine import Engine

SCHEMA = "kvfix.latency/1"


@dataclass(frozen=True)
class Grid:
    """Every context length with every length and place of the edit and every k."""

    contexts: Sequence[int]  # tokens
    ks: Sequence[int]
    spans: Sequence[int] = (1,)  # tokens
    places: Sequence[float] = (1 / 3,)  # of the edit, as fractions of the text
    rounds: int = ROUNDS

    def require_room(self) -> None:
        """Raise `UsageError` for an edit that has no room in its text, or a k that counts no rows."""
        if min(self.ks) < 0:
            raise UsageError(f"k {min(self.ks)}: expected a number of rows")
        for context, span, place in product(self.contexts, self.spans, self.places):
            if not 0 <= place < 1 or span < 1 or int(place * context) + span > context:
                raise UsageError(f"no room for a span of {span} at {place:g} of {context} tokens")


class Cell(NamedTuple):
    """One edit and one k: a row of the results."""

    old: str  # the text before the edit
    k: int
    arms: Arms
    error: float  # of recomputing every row from the edit on


def run_latency(engine: Engine, grid: Grid, notify: Notify = lambda line: None) -> dict[str, Any]:
    """The `kvfix.latency/1` document: one row a context length, span length, place and k.

    The text is made of seeded words. No time is reported unless recomputing everything from the edit on equals a fresh
    prefill. Raises `UsageError` for edits that have no room, `DocumentError` for contexts that the model cannot take.
    """
    grid.require_room()
    for context in grid.contexts:
        engine.require_fit(context)
    roofline, rows = Roofline(engine), list[dict[str, Any]]()
    for context, span in product(grid.contexts, grid.spans):
        notify(f"{context} tokens, span {span}")
        rows += _Group(engine, context, span, grid).rows(notify)
        roofline.measure_again()
    return {
        "schema": SCHEMA,
        "model": engine.describe(),
        "rows": [_beside_roofline(row, roofline) for row in rows],
        "ceilings": roofline.describe(),
        "device": str(engine.device),
        "dtype": engine.dtype_name,
        "versions": versions(),
    }


def _beside_roofline(row: dict[str, Any], roofline: Roofline) -> dict[str, Any]:
    """The row with what its passes had to do at least, and with its ratios beside those of the token counts."""
    context, first, counts = row["context"], row["edit_at"], roofline.counts
    works = {
        "repair": (counts.one_pass([row.pop("positions")]), row["recompute_ms"]),
        "full": (counts.prefill(context), row["full_prefill_ms"]),
        "suffix": (counts.suffix(first, context), row["suffix_prefill_ms"]),
    }
    ratios = {
        "token_ratio": context / row["recomputed"],
        "suffix_token_ratio": (context - first) / row["recomputed"],
    }
    return {
        **row,
        **ratios,
        "ratio_share": row["speedup_full"]["median"] / ratios["token_ratio"],
        "suffix_ratio_share": row["speedup_suffix"]["median"] / ratios["suffix_token_ratio"],
        "roofline": {name: roofline.beside(work, ms["median"]) for name, (work, ms) in works.items()},
    }


@dataclass
class _Group:
    """All edits of one length that lead to one text, so that one re-prefill a round stands beside all of them."""

    engine: Engine
    context: int
    span: int
    grid: Grid
    cells: list[Cell] = field(default_factory=list)

    def rows(self, notify: Notify) -> list[dict[str, Any]]:
        """Equality first, then times."""
        texts = Texts(self.engine, self.context)
        fresh = self.engine.prefill(texts.token_ids)
        for at in dict.fromkeys(int(place * self.context) for place in self.grid.places):
            self._add(texts, at, fresh)
        del fresh
        notify(f"{self.context} tokens, span {self.span}: {self.grid.rounds} rounds")
        times = compare_all([cell.arms for cell in self.cells], self.grid.rounds)
        found = [self._facts(cell) | ms for cell, ms in zip(self.cells, times, strict=True)]
        edits = [(cell.old, cell.k) for cell in self.cells]
        self.cells.clear()
        ends = end_to_end(self.engine, texts.text, edits, self.grid.rounds)
        return [row | end for row, end in zip(found, ends, strict=True)]

    def _add(self, texts: Texts, at: int, fresh: KVCache) -> None:
        """The cells of an edit at one token. Raises `KVFixError` where exact recomputing is not exact."""
        engine, old = self.engine, texts.changed(at, self.span)
        stale = engine.prefill(engine.encode(old).token_ids)
        plans = {k: plan_of(engine, stale.token_ids, texts.text, k) for k in self.grid.ks}
        first = plans[self.grid.ks[0]].diff.first
        error = exactness(engine, stale, fresh, first)
        if not error <= allowed_error(engine, fresh.token_ids, first):
            raise KVFixError(
                f"recomputing every row differs from a fresh prefill by {error:.2e}; no times are reported"
            )
        for k, plan in plans.items():
            rows = RowMap.of_base(np.arange(self.context)).realigned(plan.source())
            self.cells.append(Cell(old, k, Arms(engine, rows, [stale], texts.token_ids, plan), error))

    def _facts(self, cell: Cell) -> dict[str, Any]:
        plan = cell.arms.plan
        return {
            "context": self.context,
            "k": cell.k,
            "span": plan.diff.num_span,
            "edit_at": plan.diff.first,
            "positions": plan.positions,
            "recomputed": len(plan.positions),
            "max_abs_error_exact": cell.error,
        }


def exactness(engine: Engine, stale: KVCache, fresh: KVCache, first: int) -> float:
    """Largest |error| of recomputing all rows from `first` on, over stale ones, against a fresh prefill."""
    cache = engine.new_cache(fresh.token_ids)
    cache.keys.copy_(stale.keys)
    cache.values.copy_(stale.values)
    engine.recompute(cache, np.arange(first, len(fresh)))
    return distance(cache, fresh)
