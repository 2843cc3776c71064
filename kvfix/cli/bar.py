"""A bar of tokens on a terminal: documents done, tokens a second, the time left; silent elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.output import Output
from kvfix.cli.survey import Line

if TYPE_CHECKING:
    from typing_extensions import Self

CHARS_PER_TOKEN = 4.0  # until the first documents tell


class Drawn:
    """A bar that disappears when it is done, where the output draws any; its task has a field `figures`."""

    def __init__(self, out: Output, description: str, total: int | None = None) -> None:
        self._progress: Any = _progress_on(out) if out.draws else None
        self._described, self._total = description, total

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
            self._task = self._progress.add_task(self._described, total=self._total, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()


class Bar(Drawn):
    """Counts tokens towards a total that is estimated from characters, better with every document."""

    def __init__(self, out: Output) -> None:
        super().__init__(out, "looking at the documents")
        self._chars: dict[tuple[str, str], int] = {}
        self._done_chars = 0
        self._done_tokens = 0
        self._num_done = 0
        self._tokens = 0  # prefilled, also of documents that are not finished
        self._first: tuple[float, int] | None = None  # when the first tokens came, and how many

    def expect(self, lines: Iterable[Line]) -> None:
        """Take note of what there is to do."""
        self._chars = {(line.corpus, line.doc_id): line.num_chars for line in lines if line.outcome == "planned"}
        self._draw()

    def advance(self, num_tokens: int) -> None:
        """So many tokens have been prefilled."""
        self._tokens += num_tokens
        # loading the model came before these: their time is not known
        self._first = self._first or (time.monotonic(), num_tokens)
        self._draw()

    def done(self, line: Line) -> None:
        """A document is finished."""
        chars = self._chars.get((line.corpus, line.doc_id))
        if chars is not None:
            self._num_done += 1
            self._done_chars += chars
            self._done_tokens += line.record.num_tokens if line.record else 0
            self._draw()

    def _draw(self) -> None:
        if not self._progress:
            return
        known = self._done_chars / self._done_tokens if self._done_tokens else CHARS_PER_TOKEN
        total = max(sum(self._chars.values()) / known, self._tokens, 1)
        said = f"{self._num_done:,} of {len(self._chars):,} documents"
        figures = f"{self._tokens:,} tokens{self._pace(total)}"
        self._progress.update(self._task, description=said, total=total, completed=self._tokens, figures=figures)

    def _pace(self, total: float) -> str:
        if self._first is None or self._tokens == self._first[1]:
            return ""
        speed = (self._tokens - self._first[1]) / max(time.monotonic() - self._first[0], 1e-3)
        return f", {speed:,.0f} a second, {words.duration((total - self._tokens) / speed * 1e3)} left"


def _progress_on(out: Output) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[figures]}"),
        console=out.people,
        transient=True,
    )
