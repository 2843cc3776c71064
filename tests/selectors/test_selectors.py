"""Every selector against a slow, obvious one, and where its budget goes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfix.core import TokenDiff
from kvfix.errors import UnknownSelectorError
from kvfix.selectors import SELECTORS, Budget, SelectionContext, Selector, get_selector, make_plan
from kvfix.selectors.base import windows
from kvfix.selectors.blocks import blocks
from tests.selectors.contexts import PREFIX, Signals, context_of, diff_of, diffs, select


def editlocal_by_hand(diff: TokenDiff, num_rows: int) -> list[int]:
    """One window a span, row by row."""
    in_span = {row for span in diff.spans for row in range(span.new_start, span.new_end)}
    shares = [num_rows // len(diff.spans) for _ in diff.spans]
    for n in range(num_rows % len(diff.spans)):
        shares[n] += 1
    chosen: set[int] = set()
    for span, share in zip(diff.spans, shares, strict=True):
        row = span.new_end
        while share and row < diff.num_new:
            if row not in in_span and row not in chosen:
                chosen.add(row)
                share -= 1
            row += 1
    return sorted(chosen)


# ---- editlocal

TABLE = {
    "right behind the span": (diff_of(40, (10, 2, 2)), 4, None, [12, 13, 14, 15]),
    "no rows": (diff_of(40, (10, 2, 2)), 0, None, []),
    "one row": (diff_of(40, (10, 2, 2)), 1, None, [12]),
    "an insertion": (diff_of(40, (10, 3, 0)), 2, None, [13, 14]),
    "a deletion": (diff_of(40, (10, 0, 5)), 2, None, [10, 11]),
    "the end of the document": (diff_of(40, (35, 2, 2)), 9, None, [37, 38, 39]),
    "nothing is left": (diff_of(40, (38, 2, 1)), 9, None, []),
    "the end deleted": (diff_of(40, (40, 0, 7)), 9, None, []),
    "the first token": (diff_of(40, (PREFIX, 1, 1)), 3, None, [3, 4, 5]),
    "in front of the first token": (diff_of(40, (PREFIX, 4, 0)), 3, None, [6, 7, 8]),
    "two spans": (diff_of(60, (10, 1, 1), (30, 1, 1)), 3, None, [11, 12, 13, 31, 32, 33]),
    "a window skips a later span": (diff_of(60, (10, 1, 1), (13, 2, 2)), 3, None, [11, 12, 15, 16, 17, 18]),
    "touching windows go on": (diff_of(60, (10, 1, 1), (20, 1, 1)), 12, None, [*range(11, 20), *range(21, 36)]),
    "the last window stops at the end": (diff_of(24, (10, 1, 1), (20, 1, 1)), 5, None, [*range(11, 16), 21, 22, 23]),
    "a cap": (diff_of(60, (10, 1, 1), (30, 1, 1)), 10, 4, [11, 12, 31, 32]),
    "an uneven cap": (diff_of(60, (10, 1, 1), (30, 1, 1)), 10, 5, [11, 12, 13, 31, 32]),
    "a cap below the spans": (diff_of(60, (10, 1, 1), (30, 1, 1), (50, 1, 1)), 10, 2, [11, 31]),
    "a cap of nothing": (diff_of(60, (10, 1, 1)), 10, 0, []),
    "a cap above the budget": (diff_of(60, (10, 1, 1)), 2, 99, [11, 12]),
    "more than there is": (diff_of(20, (10, 1, 1)), 1000, None, [*range(11, 20)]),
}


@pytest.mark.parametrize("case", TABLE)
def test_editlocal(case):
    diff, k, cap, expected = TABLE[case]
    context = context_of(diff, k, cap)
    assert select("editlocal", context) == expected
    assert editlocal_by_hand(diff, context.num_rows) == expected


@given(diffs(), st.integers(0, 40), st.none() | st.integers(0, 60))
def test_editlocal_equals_the_slow_one(diff, k, cap):
    context = context_of(diff, k, cap)
    assert select("editlocal", context) == editlocal_by_hand(diff, context.num_rows)


@given(diffs(), st.sampled_from(list(SELECTORS)), st.integers(0, 40), st.none() | st.integers(0, 60))
def test_what_every_selector_owes(diff, name, k, cap):
    """Rows of the pool alone, within the budget, and a plan that holds every span."""
    text = ("ab, c.\n\n" * diff.num_new)[: diff.num_new - PREFIX]
    signals = Signals(np.arange(diff.num_new) % 7, tuple(np.flatnonzero(diff.source >= diff.first)[5:6]))
    context = context_of(diff, k, cap, text, signals)
    rows = select(name, context)
    if name not in ("boundary", "exact"):
        assert len(rows) <= context.num_rows
    if name == "boundary" and cap is not None:
        assert len(rows) <= cap
    plan = make_plan(get_selector(name), context)
    in_span = np.flatnonzero(diff.source < 0).tolist()
    assert plan.positions.tolist() == sorted({*in_span, *rows})
    assert (plan.selector, plan.k, plan.strategy, plan.reason) == (name, k, "repair", None)
    assert plan.token_layers(30) == 30 * len(plan.positions)


def test_windows_without_starts():
    assert windows(np.ones(5, bool), [], 3).tolist() == []


# ---- the pool and the budget


def test_the_pool_is_everything_behind_the_first_span_but_the_spans():
    context = context_of(diff_of(12, (4, 2, 1), (8, 0, 3), (10, 1, 1)), 3)
    assert np.flatnonzero(context.free).tolist() == [6, 7, 8, 9, 11]


@pytest.mark.parametrize(("k", "cap", "spans", "rows"), [(3, None, 4, 12), (3, 10, 4, 10), (0, 10, 4, 0), (3, 0, 4, 0)])
def test_the_budget_is_k_a_span(k, cap, spans, rows):
    assert Budget(k, cap).rows(spans) == rows


def test_no_span_no_rows():
    diff = TokenDiff((), 10, np.arange(10))
    for name in SELECTORS:
        assert make_plan(get_selector(name), context_of(diff, 5)).positions.tolist() == []


# ---- exact


def test_exact_takes_the_whole_pool():
    diff = diff_of(20, (5, 2, 3), (10, 0, 1))
    assert select("exact", context_of(diff, 0, 0)) == [*range(7, 20)]
    assert make_plan(get_selector("exact"), context_of(diff, 0)).positions.tolist() == [*range(5, 20)]


# ---- random


class TestRandom:
    DIFF = diff_of(42, (10, 2, 2), (20, 1, 1))

    def test_is_seeded(self):
        context = context_of(self.DIFF, 5)
        assert select("random", context, seed=3) == select("random", context, seed=3)
        assert len({tuple(select("random", context, seed=seed)) for seed in range(10)}) == 10

    @pytest.mark.parametrize(("k", "cap", "num"), [(5, None, 10), (0, None, 0), (5, 3, 3), (1000, None, 29)])
    def test_takes_the_budget(self, k, cap, num):
        assert len(select("random", context_of(self.DIFF, k, cap))) == num

    def test_is_uniform_over_the_pool(self):
        context = context_of(self.DIFF, 5)
        counts = Counter(row for seed in range(600) for row in select("random", context, seed=seed))
        expected = 600 * 10 / 29
        assert set(counts) == set(np.flatnonzero(context.free).tolist())
        assert all(0.7 * expected < count < 1.3 * expected for count in counts.values())

    def test_an_empty_pool(self):
        assert select("random", context_of(diff_of(40, (38, 2, 1)), 5)) == []


# ---- boundary

MARKDOWN = """---
title: Fees
---

# Fees

The fee is 30 crowns.
It is due in May.

| boat | fee |
|---|---|
| small | 10 |
| large | 30 |

- first item

- second item
  with more

```
# fee = 10

fee = 30
```

## Late fees

Ten crowns a day.

# Berths

Berth 4 is free."""


def boundary_of(text: str, *changes: tuple[str, str], cap: int | None = None) -> str:
    """The text that boundary selects when each `old` of a text of one character a token becomes `new`."""
    spans, new_text = [], text
    for old, new in changes:
        start = new_text.index(old)
        new_text = new_text[:start] + new + new_text[start + len(old) :]
        spans.append((PREFIX + start, len(new), len(old)))
    context = context_of(diff_of(PREFIX + len(new_text), *spans), 0, cap, new_text)
    return "".join(new_text[row - PREFIX] for row in select("boundary", context))


@pytest.mark.parametrize(
    ("old", "new", "selected"),
    [
        ("30 crowns", "45 crowns", ".\nIt is due in May.\n\n"),
        ("title: Fees", "title: Dues", "\n---\n\n"),
        ("small | 10", "small | 12", " |\n| large | 30 |\n\n"),
        ("first", "1st", " item\n\n- second item\n  with more\n\n"),
        ("with more", "with less", "\n\n"),
        ("# fee = 10", "# fee = 12", "\n\nfee = 30\n```\n\n"),
        ("fee = 30", "fee = 99", "\n```\n\n"),
        ("Late fees", "Late dues", "\n\nTen crowns a day.\n\n"),
        ("# Fees\n", "# Dues\n", MARKDOWN[MARKDOWN.index("\nThe fee") : MARKDOWN.index("# Berths")]),
        ("free.", "let.", ""),
        ("Berth 4", "Berth 5", " is free."),
        (" is free.", "", ""),
        ("---\ntitle", "+++\ntitle", ": Fees\n---\n\n"),
        ("30 crowns", "", ".\nIt is due in May.\n\n"),
        ("\n\nBerth 4", "", " is free."),
    ],
)
def test_boundary_ends_with_the_block(old, new, selected):
    assert boundary_of(MARKDOWN, (old, new)) == selected


def test_boundary_with_windows_line_ends():
    text = MARKDOWN.replace("\n", "\r\n")
    assert boundary_of(text, ("30 crowns", "45 crowns")) == ".\r\nIt is due in May.\r\n\r\n"


def test_boundary_of_several_spans():
    assert boundary_of(MARKDOWN, ("30 crowns", "45 crowns"), ("Ten", "Six")) == (
        ".\nIt is due in May.\n\n" + " crowns a day.\n\n"
    )


def test_boundary_of_two_spans_in_one_block_skips_the_later():
    assert boundary_of(MARKDOWN, ("fee is", "due is"), ("due in May", "due in June")) == (
        " 30 crowns.\nIt is " + ".\n\n"
    )


def test_boundary_is_capped():
    assert boundary_of(MARKDOWN, ("30 crowns", "45 crowns"), ("Ten", "Six"), cap=7) == ".\nIt is"
    assert boundary_of(MARKDOWN, ("30 crowns", "45 crowns"), cap=0) == ""


def test_boundary_of_tokens_that_cross_a_block():
    """A token that begins in a block belongs to it."""
    text = "ab\n\ncd"
    offsets = np.array([[0, 1], [1, 3], [3, 5], [5, 6]])  # a, b\n, \nc, d
    context = SelectionContext(diff_of(PREFIX + 4, (PREFIX, 1, 1)), Budget(0), text, offsets, PREFIX)
    assert select("boundary", context) == [PREFIX + 1, PREFIX + 2]


def test_boundary_where_several_tokens_make_one_character():
    text = "é漢x\n\ny"
    offsets = np.array([[0, 1], [0, 1], [1, 2], [1, 2], [1, 2], [2, 3], [3, 5], [5, 6]])
    context = SelectionContext(diff_of(PREFIX + 8, (PREFIX + 2, 1, 1)), Budget(0), text, offsets, PREFIX)
    assert select("boundary", context) == [PREFIX + 3, PREFIX + 4, PREFIX + 5, PREFIX + 6]


def boundary_by_hand(text: str, start: int, end: int) -> list[int]:
    """Character by character, for a span that ends inside a block that is no heading."""
    last = end - 1 if end > start else min(start, len(text) - 1)
    block = next(block for block in blocks(text) if block.start <= last < block.end)
    return list(range(end, block.end))


@given(st.integers(0, len(MARKDOWN)), st.integers(0, 40))
def test_boundary_equals_the_slow_one(start, length):
    end = min(len(MARKDOWN), start + length)
    last = min(end - 1 if end > start else start, len(MARKDOWN) - 1)
    if next(block for block in blocks(MARKDOWN) if block.start <= last < block.end).kind == "heading":
        return
    span = (PREFIX + start, end - start, end - start or 3)
    context = context_of(diff_of(PREFIX + len(MARKDOWN), span), 0, None, MARKDOWN)
    rows = select("boundary", context)
    assert [row - PREFIX for row in rows] == boundary_by_hand(MARKDOWN, start, end)


# ---- names


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownSelectorError) as caught:
        get_selector("editlokal")
    assert caught.value.exit_code == 2
    assert all(name in caught.value.message for name in SELECTORS)


@pytest.mark.parametrize("name", SELECTORS)
def test_the_registry_names_what_the_classes_are_called(name):
    selector = get_selector(name, seed=5, nonsense=1)
    assert isinstance(selector, Selector)
    assert selector.name == name


def test_settings_reach_those_that_have_them():
    assert get_selector("random", seed=5).seed == 5
