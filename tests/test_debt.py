"""Debt: how long the exact prefix is, and how many edits each row is behind."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfix.core import Debt, EditSpan, TokenDiff
from kvfix.debt import after_edit, fresh


def edit_of(num_old: int, *spans: tuple[int, int, int]) -> TokenDiff:
    """Spans are (old start, old tokens, new tokens)."""
    made, source, at, shift = [], [], 0, 0
    for start, old, new in spans:
        source += range(at, start)
        made.append(EditSpan(start, start + old, start + shift, start + shift + new))
        source += [-1] * new
        at, shift = start + old, shift + new - old
    source += range(at, num_old)
    return TokenDiff(tuple(made), num_old, np.array(source, np.int64))


def debt_of(exact_until: int, *behind: tuple[int, int]) -> Debt:
    return Debt(exact_until, sum(rows for _, rows in behind), behind)


EXACT = fresh(20)

CASES = {
    # before, edit, recomputed rows, after
    "repaired": (EXACT, edit_of(20, (5, 1, 1)), [5, 6, 7], debt_of(8, (0, 8), (1, 12))),
    "the span alone": (EXACT, edit_of(20, (5, 1, 1)), [5], debt_of(6, (0, 6), (1, 14))),
    "rows apart": (EXACT, edit_of(20, (5, 1, 1)), [5, 6, 10], debt_of(7, (0, 7), (1, 13))),
    "everything behind the edit": (EXACT, edit_of(20, (5, 1, 1)), range(5, 20), debt_of(20, (0, 20))),
    "everything": (EXACT, edit_of(20, (5, 1, 1)), range(20), debt_of(20, (0, 20))),
    "grown": (EXACT, edit_of(20, (5, 1, 4)), [5, 6, 7, 8, 9], debt_of(10, (0, 10), (1, 13))),
    "shrunk": (EXACT, edit_of(20, (5, 4, 1)), [5, 6], debt_of(7, (0, 7), (1, 10))),
    "a deletion": (EXACT, edit_of(20, (5, 3, 0)), [5, 6], debt_of(7, (0, 7), (1, 10))),
    "a deletion, nothing recomputed": (EXACT, edit_of(20, (5, 3, 0)), [], debt_of(5, (0, 5), (1, 12))),
    "the first token": (EXACT, edit_of(20, (0, 1, 1)), [0], debt_of(1, (0, 1), (1, 19))),
    "the first token, skipped": (EXACT, edit_of(20, (0, 1, 1)), [0, 5], debt_of(1, (0, 1), (1, 19))),
    "the end deleted": (EXACT, edit_of(20, (15, 5, 0)), [], debt_of(15, (0, 15))),
    "appended": (EXACT, edit_of(20, (20, 0, 3)), [20, 21, 22], debt_of(23, (0, 23))),
    "the last token": (EXACT, edit_of(20, (19, 1, 1)), [19], debt_of(20, (0, 20))),
    "two spans": (EXACT, edit_of(20, (5, 1, 1), (12, 1, 1)), [5, 6, 12, 13], debt_of(7, (0, 7), (1, 13))),
    "no span": (EXACT, edit_of(20), [], debt_of(20, (0, 20))),
    "again, further on": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (15, 1, 1)),
        [15, 16],
        debt_of(8, (0, 8), (1, 9), (2, 3)),
    ),
    "again, in front": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (2, 1, 1)),
        [2, 3],
        debt_of(4, (0, 4), (1, 4), (2, 12)),
    ),
    "again, across the end of the exact rows": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (6, 1, 1)),
        range(6, 12),
        debt_of(12, (0, 12), (2, 8)),
    ),
    "again, grown": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (15, 1, 4)),
        range(15, 19),
        debt_of(8, (0, 8), (1, 11), (2, 4)),
    ),
    "again, the stale end deleted": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (8, 12, 0)),
        [],
        debt_of(8, (0, 8)),
    ),
    "again, the end deleted, stale rows left": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (15, 5, 0)),
        [],
        debt_of(8, (0, 8), (1, 7)),
    ),
    "again, appended behind stale rows": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (20, 0, 2)),
        [20, 21],
        debt_of(8, (0, 8), (1, 14)),
    ),
    "again, the suffix behind stale rows": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (15, 1, 1)),
        range(15, 20),
        debt_of(8, (0, 8), (1, 12)),
    ),
    "again, everything": (debt_of(8, (0, 8), (1, 12)), edit_of(20, (15, 1, 1)), range(20), debt_of(20, (0, 20))),
    "again, everything from the first stale row": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (15, 1, 1)),
        range(8, 20),
        debt_of(20, (0, 20)),
    ),
    "again, everything but the prefix": (
        debt_of(8, (0, 8), (1, 12)),
        edit_of(20, (15, 1, 1)),
        range(2, 20),
        debt_of(20, (0, 20)),
    ),
    "again and again": (
        debt_of(3, (0, 3), (2, 10), (5, 7)),
        edit_of(20, (14, 1, 1)),
        [14],
        debt_of(3, (0, 3), (2, 10), (5, 1), (1, 1), (6, 5)),
    ),
    "from nothing": (fresh(0), edit_of(0, (0, 0, 4)), range(4), debt_of(4, (0, 4))),
    "to nothing": (EXACT, edit_of(20, (0, 20, 0)), [], debt_of(0)),
}


@pytest.mark.parametrize("case", CASES)
def test_after_an_edit(case):
    before, diff, positions, expected = CASES[case]
    assert after_edit(before, diff, np.array(positions, np.int64)) == expected


def test_fresh():
    assert fresh(7) == Debt(7, 7, ((0, 7),))
    assert fresh(0) == Debt(0, 0, ())
    assert (fresh(7).state, fresh(7).stale_rows, fresh(7).edits_behind) == ("exact", 0, 0)
    assert fresh(0).state == "exact"


def test_what_a_debt_says():
    debt = debt_of(8, (0, 8), (1, 9), (2, 3))
    assert (debt.state, debt.stale_rows, debt.edits_behind, debt.num_tokens) == ("repaired", 12, 2, 20)


class Row:
    """A row of the slow model: is it what a fresh prefill gives, and how many edits has it missed?"""

    def __init__(self, exact: bool = True, missed: int = 0) -> None:
        self.exact, self.missed = exact, missed


def slow(rows: list[Row], diff: TokenDiff, positions: list[int]) -> list[Row]:
    """Row by row: one that is computed behind exact rows only is exact."""
    after: list[Row] = []
    for place, source in enumerate(diff.source.tolist()):
        if place in positions:
            exact = all(row.exact for row in after)
            after.append(Row(exact, 0 if exact else 1))
        elif place < diff.first:
            after.append(rows[source])
        else:
            # kept behind the edit: it has missed it
            after.append(Row(False, rows[source].missed + 1))
    return after


@st.composite
def histories(draw) -> list[tuple[TokenDiff, list[int]]]:
    num, edits = draw(st.integers(1, 25)), []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, num))
        old = draw(st.integers(0, min(4, num - start)))
        new = draw(st.integers(0 if old and num > old else 1, 4))
        diff = edit_of(num, (start, old, new))
        span = np.flatnonzero(diff.source < 0).tolist()
        more = draw(st.sets(st.integers(0, diff.num_new), max_size=25))
        edits.append((diff, sorted({*span, *(row for row in more if diff.first <= row < diff.num_new)})))
        num = diff.num_new
    return edits


@given(histories())
def test_equals_the_slow_model(edits):
    debt, rows = fresh(edits[0][0].num_old), [Row() for _ in range(edits[0][0].num_old)]
    for diff, positions in edits:
        debt, rows = after_edit(debt, diff, np.array(positions, np.int64)), slow(rows, diff, positions)
        exact_until = next((n for n, row in enumerate(rows) if not row.exact), len(rows))
        assert debt.exact_until == exact_until
        assert debt.num_tokens == len(rows) == sum(count for _, count in debt.behind)
        behind = [edits for edits, count in debt.behind for _ in range(count)]
        assert behind == [row.missed for row in rows]
