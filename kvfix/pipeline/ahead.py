"""Work that runs ahead of the model: one background thread, a bounded number of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

DEPTH = 2


def ahead(
    items: Iterable[Item], prepare: Callable[[Item], Result], depth: int = DEPTH
) -> Generator[tuple[Item, Future[Result]]]:
    """Each item and what `prepare` makes of it, in order; at most `depth` are ready or under way besides.

    Whoever asks a future for its result gets what `prepare` raised. Closing the generator drops what has not begun
    and waits for the one step under way.
    """
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="kvfix-ahead") as reader:
        try:
            for item in items:
                waiting.append((item, reader.submit(prepare, item)))
                if len(waiting) > depth:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            for _, future in waiting:
                future.cancel()
