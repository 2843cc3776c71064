"""Packs: documents that share a pass over the weights, within bounds; what fails together is tried in smaller packs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvfix.pipeline.failures import stops

# repairs share a pass up to this many rows: 16 documents of 34 to 40. With the demo model 16 in such a pass are 1.5
# times as fast as one by one on two cores (k=32; kvfix bench packed), 1.24 times on one, or 2 times (k=8, 160 rows);
# twice the documents gain nothing more (examples/pack_sizes.py --cpu)
REPAIR_ROWS = 640


class Member(Protocol):
    """A document that may share a pass."""

    @property
    def num_rows(self) -> int:
        """Rows that the pass computes."""

    @property
    def held_rows(self) -> int:
        """Rows of caches and patches that are in memory meanwhile."""


Job = TypeVar("Job", bound=Member)
Result = TypeVar("Result")


def held(pack: Sequence[Member]) -> int:
    """Rows in memory while a pack is computed."""
    return sum(member.held_rows for member in pack)


@dataclass(frozen=True)
class Limits:
    """What a pass over several documents may take; one alone is always allowed."""

    num_rows: int
    held_rows: int

    def allow(self, pack: Sequence[Member], member: Member) -> bool:
        """Whether a document may join a pack; one without rows counts as one, so that no pack grows for ever."""
        larger = [*pack, member]
        num_rows = sum(max(1, one.num_rows) for one in larger)
        return not pack or (num_rows <= self.num_rows and held(larger) <= self.held_rows)


def together(pack: Sequence[Job], compute: Callable[[Sequence[Job]], Sequence[Result]]) -> list[Future[Result]]:
    """What `compute` gives for each document of a pack, from one call where that succeeds.

    A call that runs out of memory is made again for each half, one that fails otherwise for each document by itself,
    so that none suffers for another; what a document raises by itself stands in its future. Raises what concerns
    every document.
    """
    try:
        return [_future(result=result) for result in compute(pack)]
    except Exception as error:
        if stops(error):
            raise
        # the caches of the call that failed would be kept beside those of the next
        traceback.clear_frames(error.__traceback__)
        if len(pack) == 1:
            return [_future(error=error)]
        size = -(-len(pack) // 2) if ran_out_of_memory(error) else 1
    parts = [pack[start : start + size] for start in range(0, len(pack), size)]
    return [done for part in parts for done in together(part, compute)]


def ran_out_of_memory(error: Exception) -> bool:
    """Whether the device, or the allocator of the CPU, had no room."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _future(result: Result | None = None, error: Exception | None = None) -> Future[Result]:
    """One that has ended already."""
    future: Future[Result] = Future()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]
    return future
