"""A bar of tokens on a terminal: documents done, tokens a second, the time left; silent elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from kvfix.cli.output import Output
from kvfix.cli.survey import Line

CHARS_PER_TOKEN = 4.0  # until the first documents tell


class Bar:
    """Counts tokens towards a total that is estimated from characters, better with every document."""

    def __init__(self, out: Output) -> None:
        self._progress = _progress(out) if out.draws else None
        self._chars: dict[tuple[str, str], int] = {}
        self._done_chars = 0
        self._done_tokens = 0
        self._num_done = 0

    def __enter__(self) -> Bar:
        if self._progress:
            self._progress.start()
            self._task = self._progress.add_task("looking at the documents", total=None, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def expect(self, lines: Iterable[Line]) -> None:
        """Take note of what there is to do."""
        self._chars = {(line.corpus, line.doc_id): line.num_chars for line in lines if line.outcome == "planned"}
        if self._progress:
            self._progress.reset(self._task)
            self._estimate()

    def advance(self, num_tokens: int) -> None:
        """So many tokens have been prefilled."""
        if self._progress:
            self._progress.advance(self._task, num_tokens)
            speed = self._progress.tasks[0].speed
            self._progress.update(self._task, rate=f"{speed:,.0f} tokens/s" if speed else "")

    def done(self, line: Line) -> None:
        """A document is finished."""
        chars = self._chars.get((line.corpus, line.doc_id))
        if chars is None or not self._progress:
            return
        self._num_done += 1
        self._done_chars += chars
        self._done_tokens += line.record.num_tokens if line.record else 0
        self._estimate()

    def _estimate(self) -> None:
        known = self._done_chars / self._done_tokens if self._done_tokens else 0
        total = sum(self._chars.values()) / (known or CHARS_PER_TOKEN)
        said = f"{self._num_done:,} of {len(self._chars):,} documents"
        self._progress.update(self._task, description=said, total=max(total, 1))  # type: ignore[union-attr]


def _progress(out: Output) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f} tokens"),
        TextColumn("{task.fields[rate]}", style="dim"),
        TimeRemainingColumn(compact=True),
        console=out.people,
        transient=True,
    )
