"""The selectors that rank rows by figures of the model, with figures given by hand, against slow, obvious twins."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfix.errors import UsageError
from kvfix.selectors import SelectionContext, get_selector
from kvfix.selectors.base import largest_plan
from kvfix.selectors.blocks import blocks
from tests.selectors.contexts import PREFIX, Signals, context_of, diff_of, diffs, select

RANKING = ("attention", "deviation", "causal")


def ranked_by_hand(context: SelectionContext, scores: np.ndarray) -> list[int]:
    rows = [row for row in range(len(context.free)) if context.free[row]]
    return sorted(sorted(rows, key=lambda row: (-scores[row], row))[: context.num_rows])


TABLE = {
    # diff, k, cap, scores by position (others 0), selected
    "the highest": (diff_of(20, (5, 1, 1)), 2, None, {7: 1, 12: 3, 9: 2}, [9, 12]),
    "ties go to the lower": (diff_of(20, (5, 1, 1)), 3, None, {15: 1}, [6, 7, 15]),
    "before the edit and in the span nothing counts": (
        diff_of(20, (5, 2, 2)),
        1,
        None,
        {2: 9, 5: 8, 6: 7, 10: 1},
        [10],
    ),
    "no rows": (diff_of(20, (5, 1, 1)), 0, None, {7: 1}, []),
    "more than there is": (diff_of(10, (5, 1, 1)), 99, None, {7: 1}, [6, 7, 8, 9]),
    "a span at the end": (diff_of(10, (9, 1, 1)), 4, None, {7: 1}, []),
    "one budget for all spans": (diff_of(30, (5, 1, 1), (20, 2, 3)), 1, None, {8: 1, 9: 2, 25: 0.5}, [8, 9]),
    "a cap": (diff_of(30, (5, 1, 1), (20, 2, 3)), 5, 1, {8: 1, 25: 2}, [25]),
    "a deletion": (diff_of(20, (5, 0, 4)), 1, None, {5: 1}, [5]),
}


@pytest.mark.parametrize("name", RANKING)
@pytest.mark.parametrize("case", TABLE)
def test_the_highest_scores(name, case):
    diff, k, cap, given_scores, expected = TABLE[case]
    scores = np.zeros(diff.num_new)
    scores[list(given_scores)] = list(given_scores.values())
    context = context_of(diff, k, cap, signals=Signals(scores))
    assert select(name, context) == expected
    assert ranked_by_hand(context, scores) == expected


@given(diffs(), st.sampled_from(RANKING), st.integers(0, 40), st.none() | st.integers(0, 60), st.randoms())
def test_ranking_equals_the_slow_one(diff, name, k, cap, random):
    scores = np.array([random.randrange(6) for _ in range(diff.num_new)])
    context = context_of(diff, k, cap, signals=Signals(scores))
    assert select(name, context) == ranked_by_hand(context, scores)


def test_what_is_asked():
    diff = diff_of(10, (5, 1, 1))
    for name, settings, asked in (
        ("attention", {}, (5, 6)),
        ("deviation", {}, (1, "both")),
        ("deviation", {"layer": 2, "of": "keys"}, (2, "keys")),
        ("causal", {}, (6, 7, 8, 9)),
    ):
        signals = Signals(np.zeros(10))
        select(name, context_of(diff, 2, signals=signals), **settings)
        assert signals.asked == [asked]


# ---- what is missing is named


@pytest.mark.parametrize("name", ["attention", "deviation"])
def test_without_a_model(name):
    context = replace(context_of(diff_of(10, (5, 1, 1)), 2), evidence=None)
    with pytest.raises(UsageError, match=f"selector {name} looks at the stale rows with the model"):
        get_selector(name).select(context)


def test_without_a_question():
    context = replace(context_of(diff_of(10, (5, 1, 1)), 2), query_ids=())
    with pytest.raises(UsageError, match="needs a question: give --query, or probes"):
        get_selector("attention").select(context)


@pytest.mark.parametrize("name", ["causal", "carrier"])
def test_diagnostics_are_for_benchmarks(name):
    context = replace(context_of(diff_of(10, (5, 1, 1)), 2), diagnosis=None)
    with pytest.raises(UsageError, match=f"{name} is a diagnostic: .* use `kvfix bench items`"):
        get_selector(name).select(context)


@given(diffs(), st.sampled_from(["attention", "deviation"]), st.integers(0, 40), st.none() | st.integers(0, 60))
def test_the_largest_plan_is_as_large_as_the_plan(diff, name, k, cap):
    context = context_of(diff, k, cap)
    plan = largest_plan(get_selector(name), replace(context, evidence=None))
    assert len(plan.positions) == diff.num_span + len(select(name, context))
    assert (plan.selector, plan.k, plan.strategy) == (name, k, "repair")
    assert plan.reason == f"{name} chooses its rows with the model; this is the most that it takes"


# ---- carrier

TEXT = "abcde\n\nfghij\n\nk\n\nlmnop"  # blocks begin at 0, 7, 14, 17


def carrier_by_hand(context: SelectionContext, carriers: tuple[int, ...]) -> list[int]:
    start = context.diff.spans[0].new_end
    if carriers:
        inside = [b.start for b in blocks(context.text) if b.start <= carriers[0] - PREFIX < b.end]
        start = max(start, PREFIX + inside[0])
    return [row for row in range(start, len(context.free)) if context.free[row]][: context.num_rows]


CARRIER = {
    # spans in the text, k, carriers, positions in the text
    "from the start of its block": ([(1, 1, 1)], 3, (10,), [7, 8, 9]),
    "the first of several": ([(1, 1, 1)], 3, (19, 20), [17, 18, 19]),
    "beyond its block": ([(1, 1, 1)], 5, (14,), [14, 15, 16, 17, 18]),
    "in the edited block": ([(1, 2, 2)], 3, (4,), [3, 4, 5]),
    "nowhere": ([(1, 2, 1)], 3, (), [3, 4, 5]),
    "over a later span": ([(1, 1, 1), (8, 1, 3)], 2, (10,), [7, 9, 10, 11]),
    "no rows": ([(1, 1, 1)], 0, (10,), []),
    "at the end": ([(1, 1, 1)], 99, (20,), [17, 18, 19, 20, 21]),
    "a span at the end": ([(21, 1, 1)], 4, (), []),
}


@pytest.mark.parametrize("case", CARRIER)
def test_carrier(case):
    spans, k, carriers, expected = CARRIER[case]
    diff = diff_of(PREFIX + len(TEXT), *((PREFIX + start, new, old) for start, new, old in spans))
    carriers = tuple(PREFIX + place for place in carriers)
    context = context_of(diff, k, None, TEXT, Signals(np.zeros(diff.num_new), carriers))
    assert [row - PREFIX for row in select("carrier", context)] == expected
    assert carrier_by_hand(context, carriers) == [PREFIX + place for place in expected]
