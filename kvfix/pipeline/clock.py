"""Wall time by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
