"""kvfix bench items: every selector on every item, a record for each, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.cli.bench_generate import kinds, write_items
from kvfix.cli.items_tables import said
from kvfix.cli.options import (
    ENGINE,
    PRINTING,
    Count,
    Distances,
    FillerDir,
    Generate,
    ItemContext,
    ItemSeed,
    ItemsFile,
    Ks,
    Limit,
    PlotsDir,
    RecordsFile,
    ReportOnly,
    Seeds,
    Selectors,
    Split,
    Transplant,
    Variant,
    numbers,
)
from kvfix.cli.study_bar import StudyBar
from kvfix.cli.verb import Run, verb
from kvfix.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvfix.bench.records import Record, Records
    from kvfix.bench.study import Study


@verb(ENGINE, PRINTING, example="kvfix bench items --items items.jsonl --selectors editlocal,exact --k 8,32")
def items(
    run: Run,
    items: ItemsFile = None,
    selectors: Selectors = None,
    k: Ks = "32",
    out: RecordsFile = None,
    plots: PlotsDir = None,
    limit: Limit = None,
    seeds: Seeds = 5,
    transplant: Transplant = 0,
    report_only: ReportOnly = False,
    generate: Generate = None,
    filler: FillerDir = None,
    count: Count = 60,
    distances: Distances = "0",
    variant: Variant = "same",
    split: Split = "holdout",
    context: ItemContext = 1200,
    item_seed: ItemSeed = 0,
) -> None:
    """Repair benchmark items with every selector and k, and compare what they recover.

    Items whose answer a fresh cache does not give, or that the edit hardly changes, are dropped and counted. A study
    that was broken off goes on where its records end. With --generate, items are written and nothing is run.
    """
    if generate is not None:
        wanted = kinds(generate, distances, count, variant, split, context, item_seed)
        write_items(run, items, filler, wanted)
        return
    from kvfix.bench.extras import extra
    from kvfix.bench.records import Records
    from kvfix.bench.summary import summarise

    # hours of repairs are not to end with a library that is missing
    for library in ("scipy", *(("matplotlib",) if plots else ())):
        extra(library)
    if report_only and out is None:
        raise UsageError("--report-only needs --out, the records to report on")
    records = Records(out)
    _print(run, records.all)
    if not report_only:
        _run(run, items, _study(selectors, k, seeds, transplant), records, limit)
    body = summarise(records.all)
    run.out.document(body)
    run.out.show(*said(body))
    if plots is not None:
        from kvfix.bench.plots import draw

        for path in draw(body, plots):
            run.out.note(f"drew {path}")


def _study(selectors: str | None, k: str, seeds: int, transplant: int) -> Study:
    from kvfix.bench.study import DEPLOYABLE, Study

    names = DEPLOYABLE if selectors is None else tuple(name.strip() for name in selectors.split(","))
    return Study(tuple(dict.fromkeys(names)), tuple(dict.fromkeys(numbers("--k", k))), seeds, transplant)


def _run(run: Run, path: Path | None, study: Study, records: Records, limit: int | None) -> None:
    from kvfix.bench.items import load_items

    if path is None:
        raise UsageError("name the items with --items FILE.jsonl")
    chosen = load_items(path)[:limit]
    engine: Any = run.engine()
    from kvfix.bench.study import run_study

    with StudyBar(run.out, len(chosen)) as bar:
        for progress in run_study(engine, chosen, study, records):
            _print(run, progress.records)
            bar.advance(progress)


def _print(run: Run, records: Iterable[Record]) -> None:
    """One line a repair; what is known of an item itself stands in the file and, summed up, in the last line."""
    from kvfix.bench.records import STALE

    for record in records:
        if record["selector"] != STALE:
            run.out.line(record)
