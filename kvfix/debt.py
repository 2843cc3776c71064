"""How far a cache is from a fresh prefill after an edit: exact prefix, and edits behind a row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvfix.core import Debt, TokenDiff


def fresh(num_tokens: int) -> Debt:
    """A cache that equals a fresh prefill."""
    return Debt(num_tokens, num_tokens, ((0, num_tokens),) if num_tokens else ())


def after_edit(debt: Debt, diff: TokenDiff, positions: np.ndarray) -> Debt:
    """The debt once the rows at `positions` (ascending) were recomputed.

    Rows before the first span are as they were. From there on a kept row is one edit further behind; a recomputed
    one equals a fresh one as long as all rows before it do, and counts as one edit behind otherwise.
    """
    num_new = diff.num_new
    recomputed = np.zeros(num_new, bool)
    recomputed[positions] = True
    start = min(debt.exact_until, diff.first)
    # the exact prefix ends at the first row that was left, be it one that was stale before
    left = np.flatnonzero(~recomputed[start:])
    exact_until = start + int(left[0]) if len(left) else num_new
    behind = np.zeros(num_new, np.int64)
    kept = diff.source >= 0
    behind[kept] = _expand(debt)[diff.source[kept]]
    behind[diff.first :] += 1
    behind[recomputed] = 1
    behind[:exact_until] = 0
    return Debt(exact_until, num_new, _runs(behind))


def _expand(debt: Debt) -> np.ndarray:
    if not debt.behind:
        return np.zeros(debt.num_tokens, np.int64)
    edits, counts = np.array(debt.behind, np.int64).T
    return np.repeat(edits, counts)


def _runs(behind: np.ndarray) -> tuple[tuple[int, int], ...]:
    if len(behind) == 0:
        return ()
    edges = np.concatenate([[0], np.flatnonzero(np.diff(behind)) + 1, [len(behind)]])
    return tuple((int(behind[low]), int(high - low)) for low, high in pairwise(edges))
