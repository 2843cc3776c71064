"""Token-level difference of two texts: few, small spans, and the old row of every token that stayed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np
from rapidfuzz.distance import Indel, Levenshtein

from kvfix.core import EditSpan, TokenDiff

# an Indel table takes one bit a cell: 8 MB at this size, about 20 ms
DIRECT_CELLS = 8192 * 8192
ANCHOR_LENGTH = 8


def diff_tokens(old_ids: np.ndarray, new_ids: np.ndarray, join_gap: int = 9) -> TokenDiff:
    """The spans in which two `[N]` int64 sequences differ; spans fewer than `join_gap` tokens apart are one.

    The spans are exact at any size. They are the smallest possible up to `DIRECT_CELLS` cells between the common
    ends; above that the sequences are first pinned together where both hold the same n-gram exactly once.
    """
    old, new = np.asarray(old_ids, np.int64), np.asarray(new_ids, np.int64)
    touching_joined = _join(_edits(old, new, EditSpan(0, len(old), 0, len(new))), 1)
    spans = tuple(_join(_settle(touching_joined, old, new), max(join_gap, 1)))
    return TokenDiff(spans, len(old), _source(spans, len(old), len(new)))


def span_texts(
    diff: TokenDiff, old_text: str, old_offsets: np.ndarray, new_text: str, new_offsets: np.ndarray, num_prefix: int
) -> list[tuple[str, str]]:
    """Each span's old and new characters, cut from the texts by the `[N, 2]` offsets of their document tokens."""
    return [
        (
            slice_text(old_text, old_offsets, span.old_start - num_prefix, span.old_end - num_prefix),
            slice_text(new_text, new_offsets, span.new_start - num_prefix, span.new_end - num_prefix),
        )
        for span in diff.spans
    ]


def slice_text(text: str, offsets: np.ndarray, start: int, end: int) -> str:
    """The characters of document tokens `[start, end)`, with the whitespace that some tokenizers leave before them."""
    start = max(start, 0)
    if end <= start:
        return ""
    before = int(offsets[start - 1][1]) if start else 0
    return text[min(before, int(offsets[start][0])) : int(offsets[end - 1][1])]


def _edits(old: np.ndarray, new: np.ndarray, box: EditSpan, may_pin: bool = True) -> list[EditSpan]:
    """The differences inside `box`, in order."""
    box = _trim(old, new, box)
    if not box.num_old or not box.num_new:
        return [box] if box.num_old or box.num_new else []
    is_large = box.num_old * box.num_new > DIRECT_CELLS
    if is_large and may_pin:
        return [edit for gap in _gaps_between_pins(old, new, box) for edit in _edits(old, new, gap, may_pin=False)]
    # Levenshtein's opcodes take linear memory, Indel's keep more tokens when text has moved
    distance = Levenshtein if is_large else Indel
    ops = distance.opcodes(old[box.old_start : box.old_end].tolist(), new[box.new_start : box.new_end].tolist())
    i, j = box.old_start, box.new_start
    return [
        EditSpan(i + op.src_start, i + op.src_end, j + op.dest_start, j + op.dest_end)
        for op in ops
        if op.tag != "equal"
    ]


def _trim(old: np.ndarray, new: np.ndarray, box: EditSpan) -> EditSpan:
    old, new = old[box.old_start : box.old_end], new[box.new_start : box.new_end]
    head = _common_prefix(old, new)
    tail = _common_prefix(old[head:][::-1], new[head:][::-1])
    return EditSpan(box.old_start + head, box.old_end - tail, box.new_start + head, box.new_end - tail)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter


def _gaps_between_pins(old: np.ndarray, new: np.ndarray, box: EditSpan) -> Iterator[EditSpan]:
    """What lies between tokens that surely correspond: patience diff's idea, over n-grams."""
    pins_old, pins_new = _pins(old[box.old_start : box.old_end], new[box.new_start : box.new_end])
    starts_old = np.concatenate(([box.old_start], box.old_start + pins_old + 1))
    starts_new = np.concatenate(([box.new_start], box.new_start + pins_new + 1))
    ends_old = np.concatenate((box.old_start + pins_old, [box.old_end]))
    ends_new = np.concatenate((box.new_start + pins_new, [box.new_end]))
    for gap in np.flatnonzero((ends_old > starts_old) | (ends_new > starts_new)):
        yield EditSpan(int(starts_old[gap]), int(ends_old[gap]), int(starts_new[gap]), int(ends_new[gap]))


def _pins(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of equal tokens, ascending in both: starts of n-grams that occur once in each sequence."""
    grams_old, at_old = _unique_grams(old)
    grams_new, at_new = _unique_grams(new)
    _, in_old, in_new = np.intersect1d(grams_old, grams_new, assume_unique=True, return_indices=True)
    i, j = at_old[in_old], at_new[in_new]
    # two grams may share a hash, and a pin must be a true match
    equal = old[i] == new[j]
    i, j = i[equal], j[equal]
    order = np.argsort(i)
    i, j = i[order], j[order]
    chain = _longest_increasing(j.tolist())
    return i[chain], j[chain]


def _unique_grams(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the n-grams that occur once in `ids`, and their starts."""
    num_grams = len(ids) - ANCHOR_LENGTH + 1
    if num_grams < 1:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    hashes = np.zeros(num_grams, np.uint64)
    for offset in range(ANCHOR_LENGTH):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + num_grams].astype(np.uint64)
    grams, first, count = np.unique(hashes, return_index=True, return_counts=True)
    return grams[count == 1], first[count == 1]


def _longest_increasing(values: list[int]) -> list[int]:
    """Indices of a longest increasing subsequence of distinct values."""
    tops: list[int] = []
    top_index: list[int] = []
    previous: list[int] = []
    for index, value in enumerate(values):
        pile = bisect_left(tops, value)
        previous.append(top_index[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [value]
        top_index[pile : pile + 1] = [index]
    chain = []
    index = top_index[-1] if top_index else -1
    while index >= 0:
        chain.append(index)
        index = previous[index]
    return chain[::-1]


def _settle(edits: list[EditSpan], old: np.ndarray, new: np.ndarray) -> list[EditSpan]:
    """Insertions and deletions in repeated content put as late as they can stand, as trimming a prefix puts them."""
    settled: list[EditSpan] = []
    limit_old, limit_new = len(old), len(new)
    for edit in reversed(edits):
        steps = 0
        if not edit.num_old:
            steps = _free_steps(new, edit.new_start, edit.new_end, limit_new)
        elif not edit.num_new:
            steps = _free_steps(old, edit.old_start, edit.old_end, limit_old)
        edit = EditSpan(edit.old_start + steps, edit.old_end + steps, edit.new_start + steps, edit.new_end + steps)
        settled.append(edit)
        limit_old, limit_new = edit.old_start, edit.new_start
    return settled[::-1]


def _free_steps(ids: np.ndarray, start: int, end: int, limit: int) -> int:
    """How far the range `[start, end)` can move right, below `limit`, and leave the rest of `ids` the same text."""
    return _common_prefix(ids[start : limit - (end - start)], ids[end:limit])


def _join(edits: Iterable[EditSpan], join_gap: int) -> list[EditSpan]:
    joined: list[EditSpan] = []
    for edit in edits:
        if joined and edit.new_start - joined[-1].new_end < join_gap:
            last = joined.pop()
            edit = EditSpan(last.old_start, edit.old_end, last.new_start, edit.new_end)
        joined.append(edit)
    return joined


def _source(spans: tuple[EditSpan, ...], num_old: int, num_new: int) -> np.ndarray:
    source = np.full(num_new, -1, np.int64)
    old_at = new_at = 0
    for span in (*spans, EditSpan(num_old, num_old, num_new, num_new)):
        source[new_at : span.new_start] = np.arange(old_at, span.old_start)
        old_at, new_at = span.old_end, span.new_end
    return source
