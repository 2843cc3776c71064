"""Shapes that several verbs print: an indented block, a list of facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.style import Style
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


def listing(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    styles: Mapping[str, str] | None = None,
    width: int | None = None,
) -> RenderableType:
    """A table of any number of rows: rich's own looks at each cell many times over.

    Columns stand at the right but for those in `left`. Cells of further columns whose whole text is in
    `styles` are drawn so. The first column is folded where the lines would be longer than `width`.
    """
    widths = [max(map(_len, column)) for column in zip(header, *rows, strict=True)]
    if width is not None:
        widths[0] = min(widths[0], max(8, width - sum(widths[1:]) - 2 * len(widths[1:])))
    drawn = {text: Style.parse(style) for text, style in (styles or {}).items()}

    def line(cells: Sequence[str]) -> Iterator[Segment]:
        """As few pieces as there are styles."""
        first, *more = chop_cells(cells[0], widths[0]) if _len(cells[0]) > widths[0] else [cells[0]]
        text = ""
        for index, cell in enumerate((first, *cells[1:])):
            gap, blank = "  " if index else "", " " * (widths[index] - _len(cell))
            before, behind = (gap, blank) if index in left else (gap + blank, "")
            if index and cell in drawn:
                yield from (Segment(text + before), Segment(cell, drawn[cell]))
                text = behind
            else:
                text += before + cell + behind
        yield Segment("\n".join([text.rstrip(), *more, ""]))

    titles = (Segment(segment.text, Style(bold=True)) for segment in line(header))
    return Segments([*titles, *(segment for row in rows for segment in line(row))])


def _len(text: str) -> int:
    """Columns on a terminal."""
    return len(text) if text.isascii() else cell_len(text)
