"""Edited spans for people: what stood there and what stands there now, in colour or in brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvfix.cli import words
from kvfix.cli.layout import indented
from kvfix.diff import slice_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from kvfix.core import EditSpan
    from kvfix.pipeline.plan import Change

MOST_SPANS = 12
MOST_CHARS = 160


def span_table(change: Change, context: int = 5) -> RenderableType:
    """One line a span: its place in tokens, and its texts with `context` tokens on both sides."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    spans = change.diff.spans
    for span in spans[:MOST_SPANS]:
        table.add_row(_place(span, change.new.num_prefix), _Marked(change, span, context))
    if len(spans) > MOST_SPANS:
        table.add_row("", f"and {words.count(len(spans) - MOST_SPANS, 'more span', 'more spans')}")
    return indented(table)


def _place(span: EditSpan, prefix: int) -> str:
    """Token numbers in the new text, or where tokens are gone."""
    start, end = span.new_start - prefix, span.new_end - prefix
    return f"{start:,}" if end - start <= 1 else f"{start:,}-{end - 1:,}"


class _Marked:
    """A span in its context: red and green on a terminal, `[-old-]{+new+}` where there is no colour."""

    def __init__(self, change: Change, span: EditSpan, context: int) -> None:
        prefix, offsets, text = change.new.num_prefix, change.new.offsets, change.document.text
        start, end = span.new_start - prefix, span.new_end - prefix
        self._before = words.visible(slice_text(text, offsets, start - context, start))
        self._after = words.visible(slice_text(text, offsets, end, min(end + context, len(offsets))))
        self._new = words.visible(slice_text(text, offsets, start, end))
        old = slice_text(change.snapshot.text, change.old.offsets, span.old_start - prefix, span.old_end - prefix)
        self._old = words.visible(old)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        coloured = console.color_system is not None
        text = Text(self._before, "dim", overflow="fold")
        for part, style, marks in ((self._old, "red strike", "[-{}-]"), (self._new, "green", "{{+{}+}}")):
            if part:
                shown = words.middle(part, MOST_CHARS)
                text.append(shown if coloured else marks.format(shown), style)
        yield text.append(self._after, "dim")
