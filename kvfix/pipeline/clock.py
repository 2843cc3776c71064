"""Wall time by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Milliseconds by step name; a step entered twice adds up."""

    ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ms[step] = self.ms.get(step, 0.0) + (time.perf_counter() - start) * 1e3
