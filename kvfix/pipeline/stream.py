"""Streaming: the stored rows that a repair sees, brought layer by layer as its pass goes through the model.

On the CPU a layer is read when the pass comes to it, and all layers take turns in the memory of one; those of a whole
cache stay where one is needed, since text is generated behind it. On a GPU a thread reads ahead into pinned memory, and
a stream of its own copies and turns the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvfix import align
from kvfix.core import KVCache
from kvfix.pipeline.clock import Clock

if TYPE_CHECKING:
    import torch

    from kvfix.core import RowMap
    from kvfix.engine import Engine
    from kvfix.store import Snapshot

# what was read is let go of so many layers at a time
LAYERS_KEPT = 8
# layers that are on their way to a GPU before they are needed
LAYERS_AHEAD = 2


class Computed(align.Rows, Protocol):
    """Rows that a pass has computed."""

    @property
    def positions(self) -> np.ndarray: ...  # [M]


@dataclass(frozen=True)
class StoredRows:
    """The rows of a version to come, as they are stored: where each is, and how its key turns."""

    engine: Engine
    rows: RowMap
    snapshot: Snapshot
    clock: Clock = field(default_factory=Clock)
    computed: align.Rows | None = None  # rows that are not stored yet, as the segment after the last

    @property
    def segments(self) -> Sequence[align.Rows]:
        return self.snapshot.segments if self.computed is None else (*self.snapshot.segments, self.computed)

    def overlaid(self, positions: np.ndarray, computed: align.Rows) -> StoredRows:
        """The rows with those at `positions` as they have been computed; their reading is counted nowhere."""
        rows = self.rows.overlaid(positions, len(self.snapshot.segments))
        return StoredRows(self.engine, rows, self.snapshot, computed=computed)

    def read(self, cache: KVCache, layer: int, start: int = 0, end: int | None = None) -> None:
        """Gather rows `[start, end)` of a layer into the cache and turn what has moved, in place.

        A layer is turned while it is in the processor's cache, and what was read is let go of, so that the stored
        rows and their copy are never in memory together. The clock's steps are `load` and `align`.
        """
        one = slice(layer, layer + 1)
        with self.clock("load"):
            align.gather(cache, self.rows, self.segments, start, end, one)
        with self.clock("align"):
            align.turn(cache, self.rows, self.engine.rotations, start, end, one)
        if layer % LAYERS_KEPT == LAYERS_KEPT - 1 or layer == cache.num_layers - 1:
            self.snapshot.release()

    def read_all(self, cache: KVCache, start: int = 0) -> None:
        """The rows from `start` on, of all layers."""
        for layer in range(cache.num_layers):
            self.read(cache, layer, start)


def streamed(
    stored: StoredRows, token_ids: np.ndarray, positions: np.ndarray, room: int, *, whole: bool
) -> StreamedCache:
    """A cache for a pass over rows `positions`, which sees the rows up to the last of them.

    Questions behind it may take `room` rows; all layers stay in memory where it is to be `whole`, more than one pass
    is made or a GPU computes.
    """
    engine = stored.engine
    end = int(positions[-1]) + 1 if len(positions) else 0
    if engine.device.type == "cuda":
        return AheadCache(stored, token_ids, room, end, Lane(engine.device))
    if whole or not engine.takes_one_pass(len(token_ids), len(positions)):
        return StreamedCache(stored, token_ids, room, end)
    return PassingCache(stored, token_ids, 0, end, positions)


class StreamedCache(KVCache):
    """A cache whose rows `[0, end)` are read a layer at a time, when a pass first comes to it; a context manager.

    Leaving it ends what is under way.
    """

    def __init__(self, stored: StoredRows, token_ids: np.ndarray, room: int, end: int) -> None:
        with stored.clock("load"):
            made = self._allocate(stored, token_ids, room, end)
        super().__init__(made.keys, made.values, token_ids, made.origin)
        self.stored, self.end, self.num_ready = stored, end, 0
        # counted also where no pass comes to a layer
        stored.clock.ms.setdefault("align", 0.0)

    def _allocate(self, stored: StoredRows, token_ids: np.ndarray, room: int, end: int) -> KVCache:
        return align.allocate(stored.snapshot.segments[0], stored.rows, token_ids, room, stored.engine.device)

    def __enter__(self) -> StreamedCache:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is under way between two layers."""

    def ready(self, layer: int) -> None:
        if layer < self.num_ready:
            return
        self.stored.read(self, layer, 0, self.end)
        self.num_ready = layer + 1

    def asked(self, room: int, computed: Computed) -> StreamedCache:
        """The whole cache, the rows that a pass has `computed` in it, with `room` rows behind for questions."""
        for layer in range(self.num_layers):
            self.ready(layer)
        self.stored.read_all(self, self.end)
        return self

    def taken(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of these rows, `[L, H, M, D]` on the CPU."""
        keys, values = (t[:, :, positions].contiguous().cpu() for t in (self.keys, self.values))
        return keys, values


class PassingCache(StreamedCache):
    """The rows `[0, end)` of one layer after another in the same memory, anew for every pass.

    Of rows `positions`, copies are kept as a pass computes them. Questions can be put to it, a pass each; what is
    decoded token by token would read every layer once a token.
    """

    def __init__(
        self, stored: StoredRows, token_ids: np.ndarray, room: int, end: int, positions: np.ndarray | None = None
    ) -> None:
        super().__init__(stored, token_ids, room, end)
        self.positions = np.empty(0, np.int64) if positions is None else positions
        self._present = -1
        self._taken = [t.new_empty(*t.shape[:2], len(self.positions), t.shape[3]) for t in (self.keys, self.values)]

    def _allocate(self, stored: StoredRows, token_ids: np.ndarray, room: int, end: int) -> KVCache:
        tensors = []
        for like in (stored.segments[0].keys, stored.segments[0].values):
            layers, heads, _, dim = like.shape
            one = like.new_empty(1, heads, end + room, dim, device=stored.engine.device)
            one[:, :, end:] = 0
            tensors.append(one.expand(layers, -1, -1, -1))
        return KVCache(tensors[0], tensors[1], token_ids, stored.rows.origin.copy())

    def ready(self, layer: int) -> None:
        if layer != self._present:
            self.stored.read(self, layer, 0, self.end)
            self._present = layer

    def written(self, layer: int) -> None:
        if len(self.positions):
            for taken, tensor in zip(self._taken, (self.keys, self.values), strict=True):
                taken[layer] = tensor[layer][:, self.positions]

    def asked(self, room: int, computed: Computed) -> StreamedCache:
        stored = self.stored.overlaid(computed.positions, computed)
        return PassingCache(stored, self.token_ids, room, len(self.token_ids))

    def taken(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if not np.array_equal(positions, self.positions):
            raise ValueError("only the rows of the pass were kept")
        keys, values = self._taken
        return keys, values


class Lane:
    """A stream of the device beside the one that computes, for copies."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch, self._stream = torch, torch.cuda.Stream(device)
        # the memory to be written may still be read by what was computed in it before
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory for a layer's rows."""
        return self._torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def entered(self) -> Any:
        """A context in which the device's work goes into this lane."""
        return self._torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """A point in the lane that others can wait for."""
        return self._stream.record_event()

    def passed(self, mark: Any) -> None:
        """Have what is computed from now on wait for a mark."""
        self._torch.cuda.current_stream(self._stream.device).wait_event(mark)


class AheadCache(StreamedCache):
    """A cache on a GPU: a thread reads the next layers while the device computes one.

    The thread gathers a layer into pinned memory, from which its lane copies the rows and turns their keys; a pass
    waits for a layer's mark, on the device. Its clock's steps count in the thread, beside those of the pass.
    """

    def __init__(self, stored: StoredRows, token_ids: np.ndarray, room: int, end: int, lane: Lane) -> None:
        super().__init__(stored, token_ids, room, end)
        self._lane, self._thread = lane, ThreadPoolExecutor(1, thread_name_prefix="kvfix-layers")
        self._staged = [self._pinned() for _ in range(LAYERS_AHEAD)]
        self._marks: dict[int, Any] = {}
        self._coming: list[Future[Any]] = [
            self._thread.submit(partial(self._bring, layer)) for layer in range(self.num_layers)
        ]

    def __exit__(self, *error: object) -> None:
        """Wait for what the lane is doing, so that the memory can be used for something else."""
        self._thread.shutdown(cancel_futures=True)
        for mark in self._marks.values():
            mark.synchronize()

    def ready(self, layer: int) -> None:
        if layer >= self.num_ready:
            self._lane.passed(self._coming[layer].result())
            self.num_ready = layer + 1

    def _pinned(self) -> KVCache:
        """Every layer's rows in the same memory."""
        keys, values = (
            self._lane.staging(t[:1, :, : self.end]).expand(len(t), -1, -1, -1) for t in (self.keys, self.values)
        )
        return KVCache(keys, values, self.token_ids, self.stored.rows.origin)

    def _bring(self, layer: int) -> Any:
        stored, staged, one = self.stored, self._staged[layer % LAYERS_AHEAD], slice(layer, layer + 1)
        if layer >= LAYERS_AHEAD:
            self._marks[layer - LAYERS_AHEAD].synchronize()
        align.gather(staged, stored.rows, stored.segments, 0, self.end, one)
        with self._lane.entered():
            for mine, theirs in ((self.keys, staged.keys), (self.values, staged.values)):
                mine[layer, :, : self.end].copy_(theirs[layer], non_blocking=True)
            align.turn(self, stored.rows, stored.engine.rotations, 0, self.end, one)
            self._marks[layer] = self._lane.mark()
        return self._marks[layer]
