"""What a pass comes to: counts and figures, gathered one report at a time, so that no report need be kept."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfix.pipeline.refresh import Refreshed
    from kvfix.pipeline.sync import Synced
    from kvfix.store import Store, VersionRecord

COMPUTED = ("built", "repaired", "reprefilled")
CHANGING = (*COMPUTED, "relinked", "pruned")
FAILING = ("skipped", "failed")
OUTCOMES = (*CHANGING, "unchanged", "removed", "left", "planned", *FAILING)
REFRESH_OUTCOMES = ("reprefilled", "left", "planned", "skipped", "failed")
STATES = ("exact", "repaired", "stale", "missing", "uncached")


@dataclass
class Tally:
    """Counts of one pass; `add` and `add_refreshed` change it in place."""

    min_mr: float
    memory: int | None = None  # bytes of rows that were allowed at a time
    outcomes: Counter[str] = field(default_factory=Counter)
    refreshes: Counter[str] = field(default_factory=Counter)
    changed: dict[tuple[str, str], None] = field(default_factory=dict)  # keys of what was changed, in order
    behind: dict[tuple[str, str], str] = field(default_factory=dict)  # keys whose cache is not their file's: the state
    sample_mrs: list[float] = field(default_factory=list)  # first attempts of sampled documents
    num_sampled: int = 0
    num_escalated: int = 0
    num_recomputed: int = 0
    num_refresh_failures: int = 0
    num_over: int = 0  # documents whose cache alone is more than the memory allowed
    largest: tuple[int, str] = (0, "")  # of these: bytes and name

    def add(self, done: Synced) -> None:
        """Count what became of a document, or of a directory that cannot be walked."""
        key = (done.corpus, done.doc_id)
        self.outcomes[done.outcome] += 1
        if done.outcome in CHANGING:
            self.changed[key] = None
        if done.doc_id.endswith("/"):
            return
        if done.outcome in (*FAILING, "left", "planned"):
            self.behind[key] = "stale" if done.record else "uncached"
        elif done.outcome == "removed":
            self.behind[key] = "missing"
        if done.outcome in COMPUTED and done.record is not None:
            self._weigh(done.record)
        if done.report is not None:
            attempts = done.report.attempts
            self.num_recomputed += sum(attempt.num_rows for attempt in attempts)
            self.num_escalated += len(attempts) > 1
            self.num_sampled += done.sampled
            if done.sampled and attempts and attempts[0].mr_median is not None:
                self.sample_mrs.append(attempts[0].mr_median)

    def _weigh(self, record: VersionRecord) -> None:
        if self.memory is not None and record.cache_bytes > self.memory:
            self.num_over += 1
            self.largest = max(self.largest, (record.cache_bytes, record.doc_id))

    def add_refreshed(self, done: Refreshed) -> None:
        """Count what became of a document with debt."""
        self.refreshes[done.outcome] += 1
        self.num_refresh_failures += done.failing
        if done.outcome == "reprefilled":
            self.changed[(done.before.corpus, done.before.doc_id)] = None

    @property
    def num_failures(self) -> int:
        return sum(self.outcomes[name] for name in FAILING) + self.num_refresh_failures

    @property
    def num_low(self) -> int:
        """Sampled documents whose first repair was below the least MR."""
        return sum(mr < self.min_mr for mr in self.sample_mrs)

    @property
    def mr_sample_median(self) -> float | None:
        return statistics.median(self.sample_mrs) if self.sample_mrs else None

    def warnings(self) -> list[str]:
        """What nobody should overlook."""
        said = []
        median = self.mr_sample_median
        if median is not None and median < self.min_mr:
            said.append(
                f"the median MR of {len(self.sample_mrs)} sampled repairs was {median:.3f} before any was escalated, "
                f"and at least {self.min_mr:g} was asked for: consider a larger --k or another --selector"
            )
        if self.num_over:
            num_bytes, name = self.largest
            said.append(
                f"documents that alone take more than the memory allowed, and were worked on by themselves: "
                f"{self.num_over}, the largest {name} with {num_bytes:,} bytes"
            )
        return said

    def totals(self) -> dict[str, int]:
        """Documents by outcome."""
        return {"documents": self.outcomes.total(), **{name: self.outcomes[name] for name in OUTCOMES}}

    def refresh_totals(self) -> dict[str, int]:
        """Documents with debt by outcome."""
        return {"documents": self.refreshes.total(), **{name: self.refreshes[name] for name in REFRESH_OUTCOMES}}

    def quality(self) -> dict[str, Any]:
        """What the checks in the loop found."""
        return {
            "num_sampled": self.num_sampled,
            "num_mr": len(self.sample_mrs),
            "mr_sample_median": self.mr_sample_median,
            "num_low": self.num_low,
            "num_escalated": self.num_escalated,
        }

    def states(self, store: Store, corpora: list[str]) -> dict[str, int]:
        """Documents of these corpora by state as the pass leaves them, and their stale rows."""
        found: Counter[str] = Counter()
        stale_rows = 0
        heads = [record for corpus in corpora for record in store.documents(corpus)]
        for record in heads:
            found[self.behind.get((record.corpus, record.doc_id), record.state)] += 1
            stale_rows += record.stale_rows
        found["uncached"] = sum(state == "uncached" for state in self.behind.values())
        return {**{state: found[state] for state in STATES}, "stale_rows": stale_rows}
