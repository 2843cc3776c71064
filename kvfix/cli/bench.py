"""kvfix bench: what repairs cost with a model on this machine, and what they recover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvfix.cli import words
from kvfix.cli.bench_items import items
from kvfix.cli.bench_packed import packed
from kvfix.cli.bench_replay import replay
from kvfix.cli.bench_store import store
from kvfix.cli.bench_tables import ceilings, grid, machine
from kvfix.cli.options import ENGINE, PRINTING, Contexts, EditAt, Ks, Rounds, Spans, fractions, numbers
from kvfix.cli.verb import Run, verb

if TYPE_CHECKING:
    from rich.table import Table

bench = typer.Typer(help="Measure what a repair costs here, and what it recovers.", rich_markup_mode="rich")
TIMES = {
    "full_prefill_ms": "full",
    "suffix_prefill_ms": "suffix",
    "recompute_ms": "repair",
    "end_to_end_ms": "end",
}
RATIOS = {"speedup_full": "x full", "speedup_suffix": "x suffix", "speedup_end_to_end": "x end"}


@verb(ENGINE, PRINTING, example="kvfix bench latency --context 1024,4096 --k 8,32")
def latency(
    run: Run, context: Contexts = "4096", k: Ks = "32", span: Spans = "1", edit_at: EditAt = "0.33", rounds: Rounds = 5
) -> None:
    """Time a repair against re-prefilling everything, and from the edit on.

    Interleaved rounds in one process; no time is printed unless the repaired rows equal fresh ones first.
    """
    contexts, ks, spans = numbers("--context", context), numbers("--k", k), numbers("--span", span)
    places = fractions("--edit-at", edit_at)
    from kvfix.bench.latency import Grid, run_latency

    with run.out.working("loading the model") as say:
        body = run_latency(run.engine(), Grid(contexts, ks, spans, places, rounds), say)
    run.out.document(body)
    if run.out.speaks:
        run.out.show(_table(body), _footnote(body, rounds), ceilings(body))


def _table(body: dict[str, Any]) -> Table:
    """In 100 columns, whatever the numbers."""
    table = grid("context", "k", "span", "at", *TIMES.values(), *RATIOS.values(), "bound", "tokens")
    for row in body["rows"]:
        sizes = [words.count(row[name]) for name in ("context", "k", "span", "edit_at")]
        times = [words.duration(row[name]["median"]) for name in TIMES]
        ratios = [words.ratio(row[name]["median"]) for name in RATIOS]
        shares = [row["roofline"]["repair"]["share"], row["ratio_share"]]
        table.add_row(*sizes, *times, *ratios, *(words.figure(share) for share in shares))
    return table


def _footnote(body: dict[str, Any], rounds: int) -> str:
    worst = max(row["max_abs_error_exact"] for row in body["rows"])
    return (
        f"\n{machine(body, rounds)}; all rows from the edit on, recomputed, lie within {worst:.1e} of fresh ones\n"
        "end: from the stored cache to the durable patch, against a prefill with a durable write of it all; "
        "tokens: x full over what the token counts alone would allow"
    )


for command in (latency, packed, store, items, replay):
    command.join(bench)
