"""What the tables of benchmarks share: their grid, and the lines below that say where the times were taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.cli import words

if TYPE_CHECKING:
    from rich.table import Table


def grid(*names: str, left: int = 0) -> Table:
    """An empty table of these columns, the first `left` of them at the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table


def machine(body: dict[str, Any], rounds: int) -> str:
    """`medians of 5 rounds on cpu in float32, torch 2.11, 2 threads`."""
    versions = body["versions"]
    threads = words.count(versions["threads"], "thread")
    where = f"{body['device']} in {body['dtype']}, torch {versions['torch']}, {threads}"
    return f"medians of {words.count(rounds, 'round')} on {where}"


def ceilings(body: dict[str, Any]) -> str:
    """The best rates that were measured, and what a share of the bound is."""
    found = body["ceilings"]
    rate = f"{found['operations_per_s'] / 1e9:,.0f} Gflop/s in the model's own matrix products"
    read = f"{found['read_bytes_per_s'] / 1e9:,.1f} GB/s read"
    assumed = f"; {found['assumed']}" if found["assumed"] else ""
    return f"bound: least time at the best rates measured here ({rate}, {read}) over the time taken{assumed}"
