"""Markdown blocks by character: paragraphs, whole lists, whole tables, fenced code, and headings with their section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

FENCE = re.compile(r"\s*(`{3,}|~{3,})(.*)")
HEADING = re.compile(r"#{1,6}\s")
ITEM = re.compile(r"\s*([-*+]|\d{1,9}[.)])\s")


class Block(NamedTuple):
    """Characters `[start, end)` of the text; `end` is where the next block starts."""

    start: int
    end: int
    kind: str  # "text", "list", "code" or "heading"
    level: int  # of a heading, else 0


def block_end(text: str, character: int) -> int:
    """Where the block around a character ends; for a heading, where its section ends."""
    found = blocks(text)
    index = next((n for n, block in enumerate(found) if character < block.end), len(found) - 1)
    if index < 0:
        return len(text)
    block = found[index]
    if block.kind != "heading":
        return block.end
    later = (b.start for b in found[index + 1 :] if b.kind == "heading" and b.level <= block.level)
    return next(later, len(text))


@lru_cache(maxsize=8)
def blocks(text: str) -> tuple[Block, ...]:
    """The blocks of a text, in order and without gaps; a list with blank lines between its items is one block."""
    merged: list[Block] = []
    for block in _paragraphs(text):
        last = merged[-1] if merged else None
        continues = block.kind == "list" or text[block.start : block.start + 2] == "  "
        if last is not None and last.kind == "list" and continues:
            merged[-1] = last._replace(end=block.end)
        else:
            merged.append(block)
    return tuple(merged)


def _paragraphs(text: str) -> Iterator[Block]:
    """Blocks parted by blank lines, fences and headings."""
    start, position, fence, kind, level, blank = 0, 0, "", "", 0, False
    for line in text.splitlines(keepends=True):
        heading = not fence and HEADING.match(line) is not None
        if not fence and kind and line.strip() and (blank or heading or kind == "heading"):
            yield Block(start, position, kind, level)
            start, kind, level = position, "", 0
        blank = not line.strip()
        if not kind and not blank:
            kind = "heading" if heading else "list" if ITEM.match(line) else "text"
            level = len(line) - len(line.lstrip("#")) if heading else 0
        before, fence = fence, _fence_after(line, fence)
        if fence != before and kind == "text":
            kind = "code"
        position += len(line)
    if position > start:
        yield Block(start, position, kind or "text", level)


def _fence_after(line: str, fence: str) -> str:
    """The mark of the fence that is open behind a line, '' for none; `fence` was open before it."""
    match = FENCE.match(line)
    if match is None:
        return fence
    mark, words = match[1], match[2].strip()
    if fence:
        return "" if mark.startswith(fence) and not words else fence
    # backticks that are closed in the same line are code within a text
    return "" if mark[0] == "`" and "`" in words else mark
