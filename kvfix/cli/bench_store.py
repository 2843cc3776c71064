"""kvfix bench store: what commits, loads and upkeep take on this disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.bench_tables import grid, machine
from kvfix.cli.options import ENGINE, READING, Context, Files, PatchRows, Rounds
from kvfix.cli.verb import Run, verb

if TYPE_CHECKING:
    from rich.table import Table


@verb(ENGINE, READING, example="kvfix bench store --store cache_store --context 1024")
def store(run: Run, context: Context = 1024, k: PatchRows = 32, documents: Files = 100, rounds: Rounds = 5) -> None:
    """Time a store's work on the disk that --store lies on: commits, loads, a pass over unchanged files, upkeep.

    In a store of its own beside that one, removed afterwards. Files are read from memory, where they were just written.
    """
    from kvfix.bench.store import StoreOptions, run_store

    options = StoreOptions(Path(run.settings.store).absolute().parent, context, k, documents, rounds)
    with run.out.working("loading the model") as say:
        body = run_store(run.engine(), options, say)
    run.out.document(body)
    if run.out.speaks:
        run.out.show(_table(body), f"\n{machine(body, rounds)}", _ceilings(body["ceilings"]))


def _table(body: dict[str, Any]) -> Table:
    table = grid("what", "each takes", "p20", "p80", "bytes", "bytes/s", "bound", "of bound", "set by", left=1)
    for row in body["rows"]:
        ms, roofline = row["each_ms"], row["roofline"]
        times = [words.duration(ms[name]) for name in ("median", "p20", "p80")]
        sizes = [words.size(round(row[name])) for name in ("data_bytes", "bytes_per_s")]
        bound = [words.duration(roofline["bound_ms"]), words.figure(roofline["share"]), roofline["bound_by"]]
        table.add_row(_name(row), *times, *sizes, *bound)
    return table


def _name(row: dict[str, Any]) -> str:
    """`load, 8 patches, moved`; `sync unchanged (of 100)`."""
    parts = [row["name"]]
    if row["patches"] is not None:
        parts.append(words.count(row["patches"], "patch", "patches"))
    if row["moved"]:
        parts.append("moved")
    return ", ".join(parts) + (f" (of {row['num_items']})" if row["num_items"] > 1 else "")


def _ceilings(found: dict[str, Any]) -> str:
    rates = [
        f"{words.size(round(found[name]))}/s {what}"
        for name, what in (
            ("write_bytes_per_s", "written with an fsync"),
            ("file_read_bytes_per_s", "read from files in memory"),
            ("copy_bytes_per_s", "copied"),
            ("hash_bytes_per_s", "hashed"),
        )
    ]
    small = f"{words.duration(found['small_write_ms'])} a small durable write"
    return f"of bound: least time at the best rates measured here ({', '.join([*rates, small])}) over the time taken"
