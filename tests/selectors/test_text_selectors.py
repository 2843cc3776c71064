"""Structure and epic, which look at nothing but the text, against slow, obvious twins."""

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfix.core import TokenDiff
from kvfix.selectors import Budget, SelectionContext
from kvfix.selectors.blocks import blocks
from kvfix.selectors.structure_selector import is_structural
from tests.selectors.contexts import PREFIX, context_of, diff_of, diffs, select

TEXT = "ab, cd.\n\ne|f|\ng-h\n\n# i\n\njk? l; (m)\n\nno pq rs tu"


def text_for(diff: TokenDiff) -> str:
    """One character for each token behind the prefix."""
    return (TEXT * (1 + diff.num_new // len(TEXT)))[: diff.num_new - PREFIX]


# ---- structure


@pytest.mark.parametrize(
    ("token", "found"),
    [
        *((mark, True) for mark in ("", " ", "\n\n", ".", " ,", "|\n", "---", "\u00a0", ' "),', "```\n")),
        *((word, False) for word in ("a", " a", ".a", "3", "\u2014", "\u3002", "a.", "_x")),
    ],
)
def test_structural_tokens(token, found):
    stripped = token.strip()
    assert is_structural(token) is found
    assert (stripped == "" or all(char in string.punctuation for char in stripped)) is found


def structure_by_hand(context: SelectionContext) -> list[int]:
    ranked = []
    for row in np.flatnonzero(context.free).tolist():
        token = context.text[row - PREFIX]
        gaps = [row - s.new_end + 1 if row >= s.new_end else s.new_start - row for s in context.diff.spans]
        if token.isspace() or token in string.punctuation:
            ranked.append((min(gaps), row))
    return sorted(row for _, row in sorted(ranked)[: context.num_rows])


STRUCTURE = {
    # diff, k, cap, text, positions in the text
    "nearest first": (diff_of(PREFIX + 12, (PREFIX, 1, 1)), 2, None, "ab.c,d;ef.gh", [2, 4]),
    "no marks": (diff_of(PREFIX + 6, (PREFIX, 1, 1)), 2, None, "abcdef", []),
    "no rows": (diff_of(PREFIX + 6, (PREFIX, 1, 1)), 0, None, "a.....", []),
    "more than there is": (diff_of(PREFIX + 6, (PREFIX, 1, 1)), 99, None, "a.b c.", [1, 3, 5]),
    "marks within the span": (diff_of(PREFIX + 6, (PREFIX + 1, 3, 2)), 9, None, "a...b.", [5]),
    "a span at the end": (diff_of(PREFIX + 6, (PREFIX + 5, 1, 1)), 9, None, "a....b", []),
    "on both sides of the second span": (
        diff_of(PREFIX + 16, (PREFIX, 1, 1), (PREFIX + 10, 1, 1)), 2, None, "xab.cdef.gyh.,ij", [3, 8, 12, 13],
    ),
    "a tie goes to the lower": (
        diff_of(PREFIX + 16, (PREFIX, 1, 1), (PREFIX + 10, 1, 1)), 9, 1, "xabcdefg.iyh.kij", [8],
    ),
    "a deletion": (diff_of(PREFIX + 8, (PREFIX + 2, 0, 3)), 1, None, "a.b.c.d.", [3]),
}  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURE)
def test_structure(case):
    diff, k, cap, text, expected = STRUCTURE[case]
    context = context_of(diff, k, cap, text)
    assert [row - PREFIX for row in select("structure", context)] == expected
    assert structure_by_hand(context) == [PREFIX + place for place in expected]


@given(diffs(), st.integers(0, 40), st.none() | st.integers(0, 60))
def test_structure_equals_the_slow_one(diff, k, cap):
    context = context_of(diff, k, cap, text_for(diff))
    assert select("structure", context) == structure_by_hand(context)


def test_the_white_space_before_a_token_belongs_to_it():
    """Some tokenizers leave it out of the offsets; a mark behind a space stays a mark, a word stays a word."""
    offsets = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
    context = SelectionContext(diff_of(PREFIX + 4, (PREFIX, 1, 1)), Budget(9), "a . b ,", offsets, PREFIX)
    assert select("structure", context) == [PREFIX + 1, PREFIX + 3]


# ---- epic


def epic_by_hand(context: SelectionContext, per_block: int) -> list[int]:
    chosen = []
    for block in blocks(context.text):
        rows = [PREFIX + char for char in range(block.start, block.end)]
        if rows[0] >= context.diff.spans[0].new_end:
            chosen += [row for row in rows[:per_block] if context.free[row]]
    return chosen[: context.num_rows]


BLOCKS = "abcde\n\nfghij\n\nk\n\nlmnop"  # blocks begin at 0, 7, 14, 17

EPIC = {
    # span in the text, k, cap, per_block, positions in the text
    "every block behind the edit": ([(1, 1, 1)], 99, None, 3, [7, 8, 9, 14, 15, 16, 17, 18, 19]),
    "in order, until the budget is spent": ([(1, 1, 1)], 4, None, 3, [7, 8, 9, 14]),
    "a block shorter than its share": ([(1, 1, 1)], 99, None, 5, [*range(7, 12), 14, 15, 16, *range(17, 22)]),
    "no rows": ([(1, 1, 1)], 0, None, 3, []),
    "a block that begins right behind the span": ([(5, 2, 2)], 2, None, 3, [7, 8]),
    "in the last block": ([(18, 1, 1)], 9, None, 3, []),
    "at the end": ([(21, 1, 1)], 9, None, 3, []),
    "the second span's rows are its own": ([(1, 1, 1), (8, 1, 1)], 99, 4, 3, [7, 9, 14, 15]),
}


@pytest.mark.parametrize("case", EPIC)
def test_epic(case):
    spans, k, cap, per_block, expected = EPIC[case]
    diff = diff_of(PREFIX + len(BLOCKS), *((PREFIX + start, new, old) for start, new, old in spans))
    context = context_of(diff, k, cap, BLOCKS)
    assert [row - PREFIX for row in select("epic", context, per_block=per_block)] == expected
    assert epic_by_hand(context, per_block) == [PREFIX + place for place in expected]


@given(diffs(), st.integers(0, 40), st.none() | st.integers(0, 60), st.integers(1, 9))
def test_epic_equals_the_slow_one(diff, k, cap, per_block):
    context = context_of(diff, k, cap, text_for(diff))
    assert select("epic", context, per_block=per_block) == epic_by_hand(context, per_block)
