"""What a repair costs beside re-prefilling, and which of the two to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvfix.core import TokenDiff

# a suffix of this many times the repaired rows costs little more than the repair and is exact: a repaired row takes 1.1
# to 1.4 times as long as one of a suffix (examples/selector_study), so that two fifths of the time are saved at most
WORTH_EXACT = 2.0

# an adaptive budget: this share of the rows behind the edit, and its bounds in rows a span. Over ordinary edits it
# comes to 24% of the suffix where k = 32 comes to 18%, for 0.01 more of the KL of a neutral question
ADAPTIVE_SHARE = 0.15
ADAPTIVE_LEAST = 32
ADAPTIVE_MOST = 256


def rows_a_span(k: int | str, num_suffix: int, num_spans: int) -> int:
    """k as it was given, or what `ADAPTIVE` comes to for an edit of so many spans."""
    return k if isinstance(k, int) else adaptive_k(num_suffix, num_spans)


def adaptive_k(num_suffix: int, num_spans: int) -> int:
    """Rows a span that grow with what lies behind the edit: a share of its rows, divided among the spans.

    Far rows keep what a fixed k leaves stale, so a long suffix gets more. `num_suffix` counts the rows from the first
    span on. With the share and the bounds above, repairs that the cost model takes stay below a quarter of the suffix
    in the mean over ordinary edits. The rule is this project's definition.
    """
    wanted = math.ceil(ADAPTIVE_SHARE * num_suffix / max(1, num_spans))
    return min(max(wanted, ADAPTIVE_LEAST), ADAPTIVE_MOST)


@dataclass(frozen=True)
class Cost:
    """Rows that each way of bringing a cache up to date recomputes."""

    repair: int
    suffix: int  # from the first row that is not exact
    full: int

    @property
    def cheaper(self) -> tuple[str, str | None]:
        """The strategy to take, and why when it is not the repair."""
        if self.suffix == 0:
            return "repair", None
        if self.repair >= self.suffix:
            return self._exact(), f"the repair would recompute every row after the edit ({self.suffix} rows)"
        if self.suffix <= WORTH_EXACT * self.repair:
            reason = f"re-prefilling the last {self.suffix} rows is exact and costs no more than twice "
            return self._exact(), reason + f"a repair of {self.repair} rows"
        return "repair", None

    def _exact(self) -> str:
        return "full" if self.suffix == self.full else "suffix"


def cost(diff: TokenDiff, num_rows: int, num_prefix: int, exact_until: int) -> Cost:
    """Costs of an edit whose repair recomputes `num_rows`, with the rows before `exact_until` exact as they stand.

    The context prefix never changes.
    """
    return Cost(repair=num_rows, suffix=diff.num_new - exact_until, full=diff.num_new - num_prefix)
