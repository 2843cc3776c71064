"""kvfix build: prefill and store documents, a line for each and a bar while it lasts."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from kvfix.cli import words
from kvfix.cli.bar import Bar
from kvfix.cli.options import ENGINE, LOGGING, ROWS, WALKING, WRITING, DryRun, Force, Paths
from kvfix.cli.survey import Line, patterns, require_documents, survey, totals
from kvfix.cli.verb import Run, verb
from kvfix.corpus import resolve_corpus
from kvfix.errors import StoreMissingError

if TYPE_CHECKING:
    from rich.text import Text

    from kvfix.api import KVFix

STYLES = {"built": "green", "planned": "cyan", "unchanged": "dim"}
SOME_SKIPPED = 3


@verb(WALKING, ROWS, ENGINE, LOGGING, WRITING, example="kvfix build docs --exclude 'drafts/*'")
def build(run: Run, paths: Paths, force: Force = False, dry_run: DryRun = False) -> int:
    """Prefill and store every document below the paths.

    Unchanged documents are passed over; those that cannot be read are reported, and the rest is done.
    """
    start = time.perf_counter()
    run.out.log(
        "info", "begin", verb="build", paths=[str(path) for path in paths], store=run.settings.store, pid=os.getpid()
    )
    lines = []
    # closed at once when we are interrupted: what is being written is finished before the lock goes
    with closing((_planned if dry_run else _built)(run, paths, force)) as done:
        for line in done:
            lines.append(line)
            _show(run, line)
    sums = totals(lines)
    seconds = time.perf_counter() - start
    documents = [line.to_json() for line in lines]
    run.out.log("info", "end", verb="build", totals=sums, timing_ms={"total": seconds * 1e3})
    run.out.document({"schema": "kvfix.build/1", "documents": documents, "totals": sums | {"total_ms": seconds * 1e3}})
    run.out.show(_summary(lines, seconds))
    _warn_of_large(run, lines)
    return SOME_SKIPPED if sums["skipped"] else 0


def _warn_of_large(run: Run, lines: Sequence[Line]) -> None:
    allowed = run.settings.memory
    for line in lines:
        if allowed is not None and line.outcome == "built" and line.record and line.record.cache_bytes > allowed:
            run.out.warn(f"{line.doc_id} takes {words.size(line.record.cache_bytes)} by itself, more than --memory")


def _planned(run: Run, paths: Sequence[Path], force: bool) -> Generator[Line]:
    """What would be done; a store that is not there yet stays away."""
    try:
        with run.open(read_only=True) as kv:
            yield from survey(kv.store, run.settings, paths, force)
    except StoreMissingError:
        yield from survey(None, run.settings, paths, force)


def _built(run: Run, paths: Sequence[Path], force: bool) -> Generator[Line]:
    # every path is looked at before the first model is loaded
    require_documents(run.settings, paths)
    with run.open(create=True) as kv, run.writing(kv, "build"), Bar(run.out) as bar:
        if run.out.draws:
            bar.expect(survey(kv.store, run.settings, paths, force))
        for path in paths:
            for line in _built_below(run, kv, path, force, bar):
                bar.done(line)
                yield line


def _built_below(run: Run, kv: KVFix, path: Path, force: bool, bar: Bar) -> Generator[Line]:
    corpus = resolve_corpus(path, kv.store.corpora())
    memory = run.settings.memory
    built_below = kv.build(path, **patterns(run.settings), force=force, progress=bar.advance, memory=memory)
    with closing(built_below) as results:  # type: ignore[type-var]
        for built in results:
            yield Line(corpus, built.doc_id, built.outcome, built.reason, built.record, built.timing_ms)


def _show(run: Run, line: Line) -> None:
    if line.outcome != "unchanged":
        told = {name: value for name, value in line.to_json().items() if value is not None}
        run.out.log("error" if line.outcome == "skipped" else "info", "document", **told)
    if line.outcome == "skipped":
        run.out.complain(f"skipped  {line.doc_id}: {line.reason}")
    elif run.out.speaks and line.outcome != "unchanged":
        run.out.show(_text(line, run.out.width))


def _text(line: Line, width: int | None) -> Text:
    from rich.text import Text

    if line.record is None:
        figures = f"{line.reason:<7}  "
    else:
        size, time_taken = words.size(line.record.stored_bytes), words.duration(sum(line.timing_ms.values()))
        figures = f"{line.record.num_tokens:>9,} tokens  {size:>8}  {time_taken:>8}  "
    text = Text(f"{line.outcome:<7}  ", STYLES[line.outcome], no_wrap=True).append(figures, "default")
    name = words.visible(line.doc_id)
    return text.append(words.tail(name, width - len(text)) if width else name, "default")


def _summary(lines: Sequence[Line], seconds: float) -> str:
    sums = totals(lines)
    said = ", ".join(f"{sums[name]:,} {name}" for name in ("planned", "built", "unchanged", "skipped") if sums[name])
    built = [line.record for line in lines if line.outcome == "built" and line.record]
    if not built:
        return said
    tokens, stored = sum(r.num_tokens for r in built), sum(r.stored_bytes for r in built)
    prefill_ms = sum(line.timing_ms.get("prefill", 0.0) for line in lines)
    speed = f", {tokens / prefill_ms * 1e3:,.0f} tokens/s" if prefill_ms else ""
    return f"{said}: {tokens:,} tokens in {words.duration(seconds * 1e3)}{speed}, {words.size(stored)} stored"
