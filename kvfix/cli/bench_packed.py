"""kvfix bench packed: repairs of several documents in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.bench_tables import ceilings, grid, machine
from kvfix.cli.options import ENGINE, PRINTING, Context, DocumentsAPass, KRows, Rounds, numbers
from kvfix.cli.verb import Run, verb

if TYPE_CHECKING:
    from rich.table import Table


@verb(ENGINE, PRINTING, example="kvfix bench packed --documents 1,4,16 --context 1024")
def packed(
    run: Run, documents: DocumentsAPass = "1,4,16,64", context: Context = 1024, k: KRows = 32, rounds: Rounds = 5
) -> None:
    """Time the repair of several documents in one pass against one by one.

    Interleaved rounds in one process; no time is printed unless the rows of both are equal first.
    """
    many = numbers("--documents", documents)
    from kvfix.bench.packed import PackedOptions, run_packed

    options = PackedOptions(many, context, k, rounds)
    with run.out.working("loading the model") as say:
        body = run_packed(run.engine(), options, say)
    run.out.document(body)
    if run.out.speaks:
        worst = max(row["max_abs_error"] for row in body["rows"])
        said = f"rows of a packed pass lie within {worst:.1e} of those of single ones"
        run.out.show(_table(body), f"\n{machine(body, rounds)}; {said}", ceilings(body))


def _table(body: dict[str, Any]) -> Table:
    table = grid("documents", "rows", "one pass", "one by one", "documents/s", "one by one", "gain", "bound")
    for row in body["rows"]:
        sizes = [words.count(row[name]) for name in ("documents", "recomputed")]
        times = [words.duration(row[name]["median"]) for name in ("packed_ms", "single_ms")]
        rates = [words.figure(row[name], ".1f") for name in ("packed_documents_per_s", "single_documents_per_s")]
        share = words.figure(row["roofline"]["packed"]["share"])
        table.add_row(*sizes, *times, *rates, words.ratio(row["speedup_packed"]["median"]), share)
    return table
