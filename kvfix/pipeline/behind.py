"""Work that runs behind the model: one background thread that stores what was computed, in order and within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from kvfix.pipeline.failures import STOPPING

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result", covariant=True)
Outcome = TypeVar("Outcome")

DEPTH = 8


@dataclass(frozen=True)
class Computed(Generic[Result]):
    """What the model has made of one document, and how it is stored; `commit` may run in another thread."""

    commit: Callable[[], Result]
    num_bytes: int = 0  # of rows that stay in memory until then, and of those that storing them takes


def nothing_to_store(outcome: Outcome) -> Computed[Outcome]:
    """An outcome that is known already, to be told at its place in the order."""
    return Computed(lambda: outcome)


class Behind(Generic[Outcome]):
    """Stores what it is handed, one piece after the other, while the caller goes on; a context manager.

    At most `most_bytes` of rows (None: a quarter of the free memory) wait, the piece under way included, and fewer than
    `DEPTH` pieces when there is said to be room: the caller asks before it computes a piece or a pack. Results come in
    the order in which the pieces were handed over, and raise what storing them raised. After an error that concerns
    every document nothing more is stored. Leaving the context stores what was handed over, for computing it was the
    dear part.
    """

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = _quarter_of_free() if most_bytes is None else most_bytes
        self._waiting: deque[tuple[int, Future[Outcome]]] = deque()
        self._fatal: Exception | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvfix-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def hand(self, piece: Computed[Outcome]) -> None:
        """Have a piece stored when those before it are."""
        self._waiting.append((piece.num_bytes, self._thread.submit(self._store, piece)))

    def results(self, room_bytes: int = 0) -> Iterator[Outcome]:
        """The results so far, waiting for further ones until `room_bytes` more are allowed (or nothing waits)."""
        while self._waiting and (self._waiting[0][1].done() or not self._has_room(room_bytes)):
            yield self._waiting.popleft()[1].result()

    def rest(self) -> Iterator[Outcome]:
        """All results that are still to come."""
        while self._waiting:
            yield self._waiting.popleft()[1].result()

    def _has_room(self, room_bytes: int) -> bool:
        under_way = [num_bytes for num_bytes, future in self._waiting if not future.done()]
        return len(under_way) < DEPTH and sum(under_way) + room_bytes <= self.most_bytes

    def _store(self, piece: Computed[Outcome]) -> Outcome:
        if self._fatal is not None:
            raise self._fatal
        try:
            return piece.commit()
        except STOPPING as error:
            self._fatal = error
            raise


def _quarter_of_free() -> int:
    import psutil

    return psutil.virtual_memory().available // 4
