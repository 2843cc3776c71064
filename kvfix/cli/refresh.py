"""kvfix refresh: full prefills of the documents with the most debt, within a time budget."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.options import ENGINE, LOGGING, WRITING, Below, DryRun, MaxDocuments, MinDebt, PassBudget
from kvfix.cli.verb import Run, verb
from kvfix.errors import DocumentError

if TYPE_CHECKING:
    from kvfix.api import KVFix
    from kvfix.pipeline.refresh import Refreshed, RefreshOptions
    from kvfix.pipeline.tally import Tally


@verb(ENGINE, LOGGING, WRITING, example="kvfix refresh docs --time-budget 10m --min-debt 500")
def refresh(
    run: Run,
    path: Below = None,
    time_budget: PassBudget = None,
    max_documents: MaxDocuments = None,
    min_debt: MinDebt = 1,
    dry_run: DryRun = False,
) -> int:
    """Prefill the documents with the most debt anew.

    Most debt first: stale rows times the edits that the worst of them is behind. Documents whose files have changed
    or are gone are left to kvfix sync.
    """
    from kvfix.pipeline.refresh import RefreshOptions
    from kvfix.pipeline.tally import Tally

    options = RefreshOptions(
        time_budget=budget(time_budget, "--time-budget"),
        max_documents=max_documents,
        min_debt=min_debt,
        max_bytes=run.settings.max_bytes,
        dry_run=dry_run,
    )
    run.out.log("info", "begin", verb="refresh", store=run.settings.store, pid=os.getpid())
    start, tally = time.perf_counter(), Tally(0.0)
    paths = [] if path is None else [path]
    with (
        run.open(read_only=dry_run) as kv,
        run.writing(kv, "refresh", unless=dry_run),
        run.out.working("looking for debt") as say,
    ):
        refreshed(run, kv, paths, options, tally, say)
        left_rows = sum(record.stale_rows for record in kv.select(path))
    sums, total_ms = tally.refresh_totals(), (time.perf_counter() - start) * 1e3
    run.out.document(
        {
            "schema": "kvfix.refresh/1",
            "summary": True,
            "totals": sums,
            "stale_rows": left_rows,
            "timing_ms": {"total": total_ms},
        }
    )
    run.out.log("info", "end", verb="refresh", totals=sums, stale_rows=left_rows, timing_ms={"total": total_ms})
    said = ", ".join(f"{sums[name]:,} {name}" for name in sums if name != "documents" and sums[name])
    run.out.show(f"{said or 'no document has debt'} in {words.duration(total_ms)}; {words.count(left_rows)} stale rows")
    return DocumentError.exit_code if tally.num_failures else 0


def refreshed(
    run: Run, kv: KVFix, paths: Sequence[str | Path], options: RefreshOptions, tally: Tally, say: Any
) -> None:
    """Refresh, and print a line a document."""
    with closing(kv.refresh(*paths, options=options, notify=say)) as reports:  # type: ignore[type-var]
        for done in reports:
            tally.add_refreshed(done)
            body = done.to_json()
            run.out.line(body)
            _show(run, done)
            told = {name: value for name, value in body.items() if name != "schema" and value is not None}
            run.out.log("error" if done.failing else "info", "refreshed", **told)


def budget(text: str | None, option: str) -> float | None:
    """Seconds. Raises `UsageError`."""
    return None if text is None else words.seconds(text, option)


def _show(run: Run, done: Refreshed) -> None:
    name = f"{done.outcome:<11}  {done.before.doc_id}"
    debt = f"{words.count(done.before.stale_rows, 'stale row')}, {words.count(done.before.edits_behind, 'edit')} behind"
    if done.failing:
        run.out.complain(f"{name}: {done.reason}")
    elif run.out.speaks:
        took = f" in {words.duration(sum(done.timing_ms.values()))}" if done.timing_ms else f": {done.reason}"
        run.out.show(words.visible(f"{name}  ({debt}){took}"))
