"""Edits and contexts that are made by hand, and what every selector owes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from kvfix.core import EditSpan, TokenDiff
from kvfix.diff import diff_tokens
from kvfix.selectors import Budget, SelectionContext, get_selector
from kvfix.selectors.links import IDEOGRAPH

PREFIX = 2


def diff_of(num_new: int, *spans: tuple[int, int, int]) -> TokenDiff:
    """A diff of N new rows, prefix included; spans are (start, new tokens, old tokens) in order."""
    made, shift, source = [], 0, np.full(num_new, -1, np.int64)
    at = 0
    for start, num, num_old in spans:
        source[at:start] = np.arange(at, start) + shift
        made.append(EditSpan(start + shift, start + shift + num_old, start, start + num))
        shift += num_old - num
        at = start + num
    source[at:] = np.arange(at, num_new) + shift
    return TokenDiff(tuple(made), num_new + shift, source)


class Signals:
    """Evidence and diagnosis of given figures `[N]`, in place of a model's."""

    def __init__(self, scores: np.ndarray, carriers: tuple[int, ...] = ()) -> None:
        self.scores, self.found = np.asarray(scores, np.float32), list(carriers)
        self.asked: list[tuple] = []

    def query_attention(self, query_ids: tuple[int, ...]) -> np.ndarray:
        self.asked.append(query_ids)
        return self.scores

    def query_contrast(self, query_ids: tuple[int, ...]) -> np.ndarray:
        self.asked.append(query_ids)
        return self.scores

    def deviation(self, layer: int, of: str) -> np.ndarray:
        self.asked.append((layer, of))
        return self.scores

    def kinship(self, layer: int) -> np.ndarray:
        self.asked.append(layer)
        return self.scores

    def transplant_effects(self, positions: np.ndarray) -> np.ndarray:
        self.asked.append(tuple(positions.tolist()))
        return self.scores[positions]

    def carriers(self) -> list[int]:
        return self.found


def context_of(
    diff: TokenDiff, k: int, cap: int | None = None, text: str | None = None, signals: Signals | None = None
) -> SelectionContext:
    """A document of one character a token; without `signals` all rows score the same."""
    num = diff.num_new - PREFIX
    offsets = np.stack([np.arange(num), np.arange(1, num + 1)], 1)
    signals = signals or Signals(np.zeros(diff.num_new))
    return SelectionContext(
        diff,
        Budget(k, cap),
        "x" * num if text is None else text,
        offsets,
        PREFIX,
        query_ids=(5, 6),
        evidence=signals,
        diagnosis=signals,
    )


def select(name: str, context: SelectionContext, **settings) -> list[int]:
    """The selected rows; what every selector owes is checked on the way."""
    rows = get_selector(name, **settings).select(context)
    assert rows.dtype == np.int64
    assert (np.diff(rows) > 0).all()
    assert context.free[rows].all()
    return rows.tolist()


@st.composite
def diffs(draw) -> TokenDiff:
    """Random spans, any distance apart."""
    spans, at = [], PREFIX
    for _ in range(draw(st.integers(1, 5))):
        start = at + draw(st.integers(0 if not spans else 1, 15))
        num, num_old = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any))
        spans.append((start, num, num_old))
        at = start + num
    return diff_of(at + draw(st.integers(0, 30)), *spans)


# words with the space before them, marks, white space and ideographs one by one
TOKEN = re.compile(f" ?[^\\W{IDEOGRAPH}]+|.", re.DOTALL)
TOKEN_IDS: dict[str, int] = {}


def between(
    before: str, after: str, k: int, cap: int | None = None, prefix: int = PREFIX, token: re.Pattern = TOKEN
) -> SelectionContext:
    """The edit from one text to another, in tokens of its own kind."""
    old, new = ([match.span() for match in token.finditer(text)] for text in (before, after))
    ids = [
        [*range(-prefix, 0), *(TOKEN_IDS.setdefault(text[low:high], len(TOKEN_IDS)) for low, high in spans)]
        for text, spans in ((before, old), (after, new))
    ]
    old_offsets, new_offsets = (np.array(spans, np.int64).reshape(-1, 2) for spans in (old, new))
    diff = diff_tokens(np.array(ids[0], np.int64), np.array(ids[1], np.int64))
    return SelectionContext(diff, Budget(k, cap), after, new_offsets, prefix, before, old_offsets)


def text_of(context: SelectionContext, rows: Iterable[int]) -> list[str]:
    """What the rows say, one string for each run of neighbours."""
    runs: list[str] = []
    last = None
    for row in rows:
        low, high = context.offsets[row - context.num_prefix]
        said = context.text[low:high]
        if last is not None and row == last + 1:
            runs[-1] += said
        else:
            runs.append(said)
        last = row
    return runs
