"""Documents of a sync whose turn has come: new and changed ones, which may share a pass, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvfix.pipeline.arms import Arm
from kvfix.pipeline.behind import Computed, nothing_to_store
from kvfix.pipeline.build import Built, Job
from kvfix.pipeline.changes import Finding
from kvfix.pipeline.repair import Patch, Repair
from kvfix.pipeline.report import EditReport
from kvfix.pipeline.synced import Synced, or_failed


@dataclass(frozen=True)
class New(Job):
    """A new document; how many rows it has, and holds, a build knows."""

    finding: Finding

    def synced(self, built: Computed[Built]) -> Computed[Synced]:
        """How to store it, as a sync tells it."""

        def commit() -> Synced:
            done = built.commit()
            return Synced(*self.finding.key, "built", "new", done.record, timing_ms=done.timing_ms)

        return Computed(commit, built.num_bytes)


@dataclass(frozen=True)
class Changed:
    """A changed document and its repair."""

    finding: Finding
    repair: Repair
    sampled: bool  # to be compared with a fresh prefill

    @property
    def num_rows(self) -> int:
        return len(self.repair.plan.positions)

    @property
    def held_rows(self) -> int:
        return self.repair.held_rows

    def synced(self, recomputed: tuple[Patch, Arm]) -> Computed[Synced]:
        """How to store what a pass has given, after it was judged."""
        return reported(self.finding, self.repair.ended(*recomputed), self.sampled)


@dataclass(frozen=True)
class Alone:
    """A document that shares no pass: its outcome is known already, or its old or its new text is empty."""

    finding: Finding
    compute: Callable[[], Computed[Synced]]
    held_rows: int = 0

    @classmethod
    def known(cls, finding: Finding, outcome: Synced) -> Alone:
        """One with nothing left to do."""
        return cls(finding, lambda: nothing_to_store(outcome))


Turn = New | Changed | Alone


def reported(finding: Finding, edited: Computed[EditReport], sampled: bool) -> Computed[Synced]:
    """An edit as a sync tells it."""

    def commit() -> Synced:
        report = edited.commit()
        return Synced(*finding.key, report.outcome, report.reason, report.record, sampled=sampled, report=report)

    return Computed(commit, edited.num_bytes)


def guarded(finding: Finding, work: Callable[[], Computed[Synced]]) -> Computed[Synced]:
    """What `work` computes; what computing or storing it raises is the document's failure."""
    done = or_failed(finding, work)
    if isinstance(done, Synced):
        return nothing_to_store(done)
    return replace(done, commit=partial(or_failed, finding, done.commit))
