"""kvfix bench: what repairs cost with a model on this machine, and what they recover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvfix.cli import words
from kvfix.cli.bench_items import items
from kvfix.cli.bench_replay import replay
from kvfix.cli.options import ENGINE, PRINTING, Contexts, EditAt, Ks, Rounds, Spans, numbers
from kvfix.cli.verb import Run, verb

if TYPE_CHECKING:
    from rich.table import Table

bench = typer.Typer(help="Measure what a repair costs here, and what it recovers.", rich_markup_mode="rich")
TIMES = ("full_prefill_ms", "suffix_prefill_ms", "recompute_ms", "end_to_end_ms")
RATIOS = ("speedup_full", "speedup_suffix", "speedup_end_to_end")


@verb(ENGINE, PRINTING, example="kvfix bench latency --context 1024,4096 --k 8,32")
def latency(
    run: Run, context: Contexts = "4096", k: Ks = "32", span: Spans = "1", edit_at: EditAt = 0.33, rounds: Rounds = 5
) -> None:
    """Time a repair against re-prefilling everything, and from the edit on.

    Interleaved rounds in one process; no time is printed unless the repaired rows equal fresh ones first.
    """
    contexts, ks, spans = numbers("--context", context), numbers("--k", k), numbers("--span", span)
    from kvfix.bench.latency import run_latency

    with run.out.working("loading the model") as say:
        body = run_latency(run.engine(), contexts, ks, spans, edit_at, rounds, say)
    run.out.document(body)
    if run.out.speaks:
        run.out.show(_table(body), _footnote(body, rounds))


def _table(body: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (
        "context",
        "k",
        "span",
        "full",
        "suffix",
        "repair",
        "end to end",
        "x full",
        "x suffix",
        "x end to end",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in body["rows"]:
        sizes = [words.count(row[name]) for name in ("context", "k", "span")]
        times = [words.duration(row[name]["median"]) for name in TIMES]
        table.add_row(*sizes, *times, *(words.ratio(row[name]["median"]) for name in RATIOS))
    return table


def _footnote(body: dict[str, Any], rounds: int) -> str:
    versions = body["versions"]
    worst = max(row["max_abs_error_exact"] for row in body["rows"])
    where = (
        f"{body['device']} in {body['dtype']}, torch {versions['torch']}, {words.count(versions['threads'], 'thread')}"
    )
    return (
        f"\nmedians of {words.count(rounds, 'round')} on {where}; all rows from the edit on, recomputed, lie within "
        f"{worst:.1e} of fresh ones"
    )


for command in (latency, items, replay):
    command.join(bench)
