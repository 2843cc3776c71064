"""Shapes that several verbs print: an indented block, a list of facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType


def indented(block: RenderableType) -> RenderableType:
    """Two columns further in."""
    return Padding(block, (0, 0, 0, 2), expand=False)


def facts_grid(facts: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    """Names in one column, what is to be said of them in the next."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts:
        grid.add_row(name, text)
    return indented(grid)
