"""Wall time by step, and wall time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Milliseconds by step name; a step entered twice adds up, and one inside another counts for itself alone."""

    ms: dict[str, float] = field(default_factory=dict)
    _inner_ms: float = 0.0  # of the steps that have ended inside the one under way

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start, before, self._inner_ms = time.perf_counter(), self._inner_ms, 0.0
        try:
            yield
        finally:
            spent = (time.perf_counter() - start) * 1e3
            self.ms[step] = self.ms.get(step, 0.0) + spent - self._inner_ms
            self._inner_ms = before + spent

    @property
    def counted_ms(self) -> float:
        """Of all steps."""
        return sum(self.ms.values())


@contextmanager
def shared(step: str, shares: Sequence[tuple[Clock, int]]) -> Iterator[None]:
    """A step that several documents take together: each clock is given its share of the time, by its weight.

    What a clock counts meanwhile for a step of its own is left out. Equal shares where no weight is above 0.
    """
    whole, total = Clock(), sum(weight for _, weight in shares)
    before = sum(clock.counted_ms for clock, _ in shares)
    try:
        with whole(step):
            yield
    finally:
        spent = whole.ms[step] - (sum(clock.counted_ms for clock, _ in shares) - before)
        for clock, weight in shares:
            part = weight / total if total else 1 / len(shares)
            clock.ms[step] = clock.ms.get(step, 0.0) + spent * part


class Deadline:
    """A time budget in seconds, counted from when it is made; None never ends."""

    def __init__(self, budget_s: float | None) -> None:
        self._end = None if budget_s is None else time.monotonic() + budget_s

    @property
    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end
