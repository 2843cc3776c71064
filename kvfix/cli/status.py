"""kvfix status: every stored document beside its file. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.options import READING, Below
from kvfix.cli.verb import Run, verb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvfix.pipeline.status import DocumentStatus

COLUMNS = ("document", "tokens", "state", "stale rows", "edits", "MR", "stored", "cache")
ROOMY = 96  # columns of a terminal from which all figures are shown
STYLES = {"exact": "green", "repaired": "cyan", "stale": "yellow", "missing": "red"}


@verb(READING, example="kvfix status docs")
def status(run: Run, path: Below = None) -> None:
    """Show the state of every document.

    Exact: equal to a fresh prefill. Repaired: within a budget. Stale: its file has changed. Missing: its file is gone.
    """
    from kvfix.pipeline.status import totals

    with run.open(read_only=True) as kv:
        found = kv.status(path)
        sums = totals(found)
        run.out.document({"schema": "kvfix.status/1", "documents": [s.to_json() for s in found], "totals": sums})
        if not found:
            run.out.note(f"no documents in {kv.store.path}; build some with: kvfix build PATH")
        elif run.out.speaks:
            for corpus, documents in groupby(found, key=lambda s: s.record.corpus):
                run.out.show(*_table(corpus, list(documents), run.out.people.width), fitted=True)
            run.out.show(_summary(sums))


def _table(corpus: str, found: list[DocumentStatus], width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    from kvfix.cli.layout import listing

    num_columns = len(COLUMNS) if width >= ROOMY else len(COLUMNS) - 1
    yield Text(words.visible(corpus), "bold")
    rows = [[*islice(_cells(status), num_columns)] for status in found]
    yield listing(COLUMNS[:num_columns], rows, left=(0, COLUMNS.index("state")), styles=STYLES, width=width)


def _cells(found: DocumentStatus) -> Iterator[str]:
    record = found.record
    yield words.visible(record.doc_id)
    yield words.count(record.num_tokens)
    yield found.state
    yield words.count(record.stale_rows) if record.stale_rows else words.NONE
    yield words.count(record.edits_behind) if record.edits_behind else words.NONE
    yield words.figure(record.last_mr)
    yield words.size(record.stored_bytes)
    yield words.size(record.cache_bytes)


def _summary(sums: dict[str, Any]) -> str:
    states = ", ".join(f"{sums[state]:,} {state}" for state in STYLES if sums[state])
    return (
        f"\n{words.count(sums['documents'], 'document')}: {states}; {sums['num_tokens']:,} tokens, "
        f"{words.size(sums['stored_bytes'])} stored"
    )
