"""kvfix sync: one pass over whole corpora for cron, a line for each document and a summary."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.cli import hook as hooks
from kvfix.cli import textfile, words
from kvfix.cli.edit import planning
from kvfix.cli.options import (
    ENGINE,
    LOGGING,
    PLANNING,
    ROWS,
    SERVING,
    WALKING,
    WRITING,
    AllowEmpty,
    DryRun,
    Hook,
    LeastMr,
    MetricsFile,
    Order,
    PassBudget,
    Paths,
    Prune,
    RefreshBudget,
    VerifySample,
)
from kvfix.cli.refresh import budget, refreshed
from kvfix.cli.survey import patterns
from kvfix.cli.verb import Run, verb
from kvfix.errors import DocumentError, StoreMissingError

if TYPE_CHECKING:
    from rich.text import Text

    from kvfix.api import KVFix
    from kvfix.pipeline.sync import Synced, SyncOptions
    from kvfix.pipeline.tally import Tally

SCHEMA = "kvfix.sync/1"
STYLES = {"removed": "yellow", "pruned": "yellow", "left": "yellow", "planned": "cyan"}
TROUBLES = ("skipped", "failed")
# of a document and of the summary, in a log
FIELDS = ("doc", "corpus", "outcome", "reason", "origin", "version", "num_tokens", "escalated_to", "timing_ms")
LOGGED = ("totals", "num_sampled", "mr_sample_median", "num_low", "num_escalated", "refresh", "hook", "timing_ms")


@verb(
    WALKING,
    PLANNING,
    {"min_mr": LeastMr},
    ROWS,
    SERVING,
    ENGINE,
    LOGGING,
    WRITING,
    example="kvfix sync docs --prune --time-budget 10m --quiet",
)
def sync(
    run: Run,
    paths: Paths,
    prune: Prune = False,
    allow_empty: AllowEmpty = False,
    order: Order = "priority",
    verify_sample: VerifySample = 0.05,
    time_budget: PassBudget = None,
    refresh_budget: RefreshBudget = None,
    hook: Hook = None,
    metrics: MetricsFile = None,
    dry_run: DryRun = False,
) -> int:
    """Bring the caches of every document below the paths up to their files.

    Builds new documents, repairs changed ones, relinks renamed ones and lists those whose files are gone. A repair
    that its probes find wanting is given more rows: twice k, four times k, all. The next run goes on where one was
    ended. Where nothing has changed, no model is loaded.
    """
    options = _options(
        run, prune=prune, order=order, verify_sample=verify_sample, time_budget=time_budget, dry_run=dry_run
    )
    told = hooks.parse(hook) if hook is not None else None
    refresh_s = budget(refresh_budget, "--refresh-budget")
    run.out.log(
        "info", "begin", verb="sync", paths=[str(path) for path in paths], store=run.settings.store, pid=os.getpid()
    )
    this = _Pass(run, paths, options, allow_empty, refresh_s, counts=run.out.json or metrics is not None)
    if dry_run:
        this.plan()
    else:
        # every path is looked at before a store is made
        _require(run, paths, allow_empty)
        with run.open(create=True) as kv, run.writing(kv, "sync"):
            this.go(kv)
    ended = hooks.run(told, [name for _, name in this.tally.changed]) if told and this.tally.changed else None
    this.finish(ended, None if dry_run else metrics)
    return DocumentError.exit_code if this.tally.num_failures else 0


def _options(run: Run, *, time_budget: str | None, **more: Any) -> SyncOptions:
    """Raises `UsageError` before anything is opened."""
    from dataclasses import replace

    from kvfix.pipeline.sync import MIN_MR, SyncOptions

    wanted = run.settings.min_mr
    settings = replace(run.settings, min_mr=None, on_low="escalate")
    return SyncOptions(
        edit=planning(settings),
        min_mr=MIN_MR if wanted is None else wanted,
        time_budget=budget(time_budget, "--time-budget"),
        memory=run.settings.memory,
        **more,
    )


def _require(run: Run, paths: Sequence[Path], allow_empty: bool) -> None:
    """Raise `UsageError` for a path where there is nothing to read, before a store is made for it."""
    from kvfix.pipeline.changes import Walk, source_at

    try:
        with run.open(read_only=True) as kv:
            for path in paths:
                source_at(path, kv.store, Walk(**patterns(run.settings)), allow_empty)
    except StoreMissingError:
        for path in paths:
            source_at(path, None, Walk(**patterns(run.settings)))


class _Pass:
    """One pass: what it prints as it goes, and what it comes to."""

    def __init__(
        self,
        run: Run,
        paths: Sequence[Path],
        options: SyncOptions,
        allow_empty: bool,
        refresh_s: float | None,
        counts: bool,
    ) -> None:
        from kvfix.pipeline.tally import Tally

        self.run, self.out, self.paths, self.options = run, run.out, paths, options
        self.allow_empty, self.refresh_s, self.counts = allow_empty, refresh_s, counts
        self.tally: Tally = Tally(options.min_mr, options.memory)
        self.states: dict[str, int] | None = None
        self.seconds = {"sync": 0.0, "refresh": 0.0}
        self.start = time.perf_counter()

    def plan(self) -> None:
        """Say what would be done; a store that is not there yet stays away."""
        from kvfix.pipeline.changes import Walk, look, source_at
        from kvfix.pipeline.sync import planned

        try:
            with self.run.open(read_only=True) as kv:
                self._take(self._synced(kv))
        except StoreMissingError:
            walk = Walk(**patterns(self.run.settings))
            sources = [source_at(path, None, walk) for path in self.paths]
            self._take(done for done in planned(look(None, sources)))

    def go(self, kv: KVFix) -> None:
        """The pass, and the refreshes behind it."""
        with self.out.working("looking at the documents") as say:
            # closed at once when we are interrupted: nothing is begun any more
            self._take(self._synced(kv, say))
            self.seconds["sync"] = time.perf_counter() - self.start
            if self.refresh_s is not None:
                self._refresh(kv, say)
        # a query over all documents, for those who read it
        self.states = self.tally.states(kv.store, self._corpora(kv)) if self.counts else None

    def _synced(self, kv: KVFix, say: Any = lambda line: None) -> Generator[Synced]:
        return kv.sync(  # type: ignore[return-value]
            *self.paths,
            options=self.options,
            **patterns(self.run.settings),
            allow_empty=self.allow_empty,
            notify=say,
        )

    def _take(self, reports: Generator[Synced]) -> None:
        with closing(reports):
            for done in reports:
                self.tally.add(done)
                self.out.line(done.to_json()) if self.out.json else _show(self.run, done)
                _log(self.run, done)

    def _refresh(self, kv: KVFix, say: Any) -> None:
        from kvfix.pipeline.refresh import RefreshOptions

        start = time.perf_counter()
        corpora = [corpus for corpus in self._corpora(kv) if kv.store.documents(corpus)]
        if corpora:
            options = RefreshOptions(time_budget=self.refresh_s, max_bytes=self.run.settings.max_bytes)
            refreshed(self.run, kv, corpora, options, self.tally, say)
        self.seconds["refresh"] = time.perf_counter() - start

    def _corpora(self, kv: KVFix) -> list[str]:
        """The corpora that the paths belong to."""
        from kvfix.corpus import resolve_corpus

        known = kv.store.corpora()
        found = [resolve_corpus(p, known) if os.path.lexists(p) else os.path.realpath(p) for p in self.paths]
        return sorted(set(found))

    def finish(self, ended: hooks.Ended | None, metrics: Path | None) -> None:
        """The figures for others, then the summary."""
        warnings = self.tally.warnings()
        warnings += [ended.problem] if ended and ended.problem else []
        if metrics is not None:
            problem = textfile.write(metrics, self._figures())
            warnings += [problem] if problem else []
        total_s = time.perf_counter() - self.start
        summary = self._summary(ended, warnings, total_s)
        self.out.document(summary)
        self.out.show(_said(self.tally, total_s))
        for line in warnings:
            self.out.complain(f"warning: {line}")
            self.out.log("warning", "warning", message=line)
        self.out.log("info", "end", verb="sync", **{name: summary[name] for name in LOGGED})

    def _summary(self, ended: hooks.Ended | None, warnings: list[str], total_s: float) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "summary": True,
            "totals": self.tally.totals(),
            "states": self.states,
            **self.tally.quality(),
            "refresh": self.tally.refresh_totals() if self.refresh_s is not None else None,
            "hook": ended.to_json() if ended else None,
            "warnings": warnings,
            "timing_ms": {**{part: s * 1e3 for part, s in self.seconds.items()}, "total": total_s * 1e3},
        }

    def _figures(self) -> dict[str, textfile.Samples]:
        states = dict(self.states or {})
        stale_rows = states.pop("stale_rows", 0)
        totals = self.tally.totals()
        del totals["documents"]
        median = self.tally.mr_sample_median
        return {
            "kvfix_documents": textfile.labelled("state", states),
            "kvfix_stale_rows": {"": stale_rows},
            "kvfix_sync_documents": textfile.labelled("outcome", totals),
            "kvfix_sync_failures": {"": self.tally.num_failures},
            "kvfix_sync_escalated": {"": self.tally.num_escalated},
            "kvfix_sync_mr_sample_median": {} if median is None else {"": median},
            "kvfix_sync_last_run_timestamp_seconds": {"": time.time()},
            "kvfix_sync_duration_seconds": textfile.labelled("part", self.seconds),
        }


def _show(run: Run, done: Synced) -> None:
    if done.outcome in TROUBLES:
        run.out.complain(f"{done.outcome:<11}  {done.doc_id}: {done.reason}")
    elif run.out.speaks and done.outcome != "unchanged":
        run.out.show(_line(done, run.out.width))


def _log(run: Run, done: Synced) -> None:
    if run.out.logs and done.outcome != "unchanged":
        body = done.to_json()
        level = "error" if done.outcome in TROUBLES else "info"
        run.out.log(level, "document", **{name: body[name] for name in FIELDS if body.get(name) is not None})


def _line(done: Synced, width: int | None) -> Text:
    from rich.text import Text

    text = Text(f"{done.outcome:<11}  ", STYLES.get(done.outcome, "green"), no_wrap=True)
    text.append(f"{_figures_of(done)}  ", "default")
    name = words.visible(done.doc_id)
    return text.append(words.tail(name, width - len(text)) if width else name, "default")


def _figures_of(done: Synced) -> str:
    """Rows and time where any were computed, else the reason."""
    if done.report is not None and done.report.tokens():
        times = done.report.timing_ms()
        rows = (done.report.tokens() or {})["recomputed"]
        more = done.report.to_json()["escalated_to"]
        said = f"{words.count(rows, 'row'):>12}  {words.duration(times['total']):>8}"
        return said + (f"  escalated to {more}" if more is not None else "")
    if done.timing_ms and done.record is not None:
        return f"{words.count(done.record.num_tokens, 'row'):>12}  {words.duration(sum(done.timing_ms.values())):>8}"
    return words.visible(done.reason or "")


def _said(tally: Tally, seconds: float) -> str:
    sums = tally.totals()
    said = [f"{sums[name]:,} {name}" for name in sums if name != "documents" and sums[name]]
    if tally.refreshes["reprefilled"]:
        said.append(f"{tally.refreshes['reprefilled']:,} refreshed")
    if tally.num_escalated:
        said.append(f"{tally.num_escalated:,} escalated")
    if tally.mr_sample_median is not None:
        said.append(f"MR {tally.mr_sample_median:.2f} (median of {len(tally.sample_mrs)} sampled)")
    return f"{', '.join(said) or 'no documents'} in {words.duration(seconds * 1e3)}"
