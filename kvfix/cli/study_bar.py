"""A bar of benchmark items on a terminal, with the time left; silent elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvfix.cli import words
from kvfix.cli.bar import Drawn
from kvfix.cli.output import Output

if TYPE_CHECKING:
    from kvfix.bench.study import Progress


class StudyBar(Drawn):
    """Counts items; the time left is told by those that were run, not by those whose records were there."""

    def __init__(self, out: Output, num_items: int) -> None:
        super().__init__(out, "items", num_items)
        self._num_items = num_items
        self._num_run = 0
        self._first = 0.0  # when the first item that was run ended: before it the model was loaded

    def advance(self, done: Progress) -> None:
        """One more item is done."""
        if not self._progress:
            return
        if done.records:
            self._num_run += 1
            self._first = self._first or time.monotonic()
        figures = f"{done.num_done:,} of {self._num_items:,}{self._left(self._num_items - done.num_done)}"
        self._progress.update(self._task, completed=done.num_done, figures=figures)

    def _left(self, num_items: int) -> str:
        if self._num_run < 2:
            return ""
        pace = (time.monotonic() - self._first) / (self._num_run - 1)
        return f", {words.duration(pace * num_items * 1e3)} left"
