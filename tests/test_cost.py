"""The cost model: repair, or what is exact and costs little more."""

import numpy as np
import pytest

from kvfix.core import ADAPTIVE, EditSpan, TokenDiff
from kvfix.cost import Cost, adaptive_k, cost, rows_a_span


@pytest.mark.parametrize("spans", [1, 4])
def test_rows_a_span(spans):
    assert rows_a_span(7, 1000, spans) == 7
    assert rows_a_span(ADAPTIVE, 1000, spans) == adaptive_k(1000, spans)


def diff_at(first: int, num_new: int) -> TokenDiff:
    source = np.arange(num_new)
    source[first : first + 1] = -1
    return TokenDiff((EditSpan(first, first + 1, first, first + 1),), num_new, source)


@pytest.mark.parametrize(
    ("counts", "strategy", "said"),
    [
        ((33, 1000, 1500), "repair", None),
        ((499, 999, 1500), "repair", None),
        ((500, 1000, 1500), "suffix", "last 1000 rows is exact and costs no more than twice a repair of 500 rows"),
        ((501, 1000, 1500), "suffix", "1000 rows"),
        ((1000, 1000, 1500), "suffix", "every row after the edit (1000 rows)"),
        ((1000, 1000, 1000), "full", "every row after the edit (1000 rows)"),
        ((600, 1000, 1000), "full", "is exact"),
        ((5, 5, 1000), "suffix", "every row"),
        ((1, 3, 1000), "repair", None),
        ((1, 2, 1000), "suffix", "is exact"),
        ((0, 0, 1000), "repair", None),
        ((0, 7, 1000), "repair", None),
    ],
)
def test_the_cheaper_way(counts, strategy, said):
    found, why = Cost(*counts).cheaper
    assert found == strategy
    assert (why is None) == (strategy == "repair")
    assert said is None or said in why


@pytest.mark.parametrize(
    ("first", "exact_until", "num_rows", "expected"),
    [
        (100, 100, 33, Cost(33, 900, 998)),
        (2, 2, 33, Cost(33, 998, 998)),
        (100, 40, 33, Cost(33, 960, 998)),
        (999, 999, 1, Cost(1, 1, 998)),
    ],
)
def test_counts_of_an_edit(first, exact_until, num_rows, expected):
    """A suffix begins where the stored rows stop being exact."""
    assert cost(diff_at(first, 1000), num_rows, 2, exact_until) == expected
