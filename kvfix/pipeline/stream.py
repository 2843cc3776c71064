"""Streaming: the stored rows that a repair sees, brought layer by layer as its pass goes through the model.

On the CPU a layer is read when the pass comes to it; where nothing is asked of the repaired cache afterwards, all
layers take turns in the memory of one. On a GPU a thread reads ahead into pinned memory, and a stream of its own copies
and turns the rows.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class StoredRows:
    """The rows of a version to come, as they are stored: where each is, and how its key turns."""

    engine: Engine
    rows: RowMap
    snapshot: Snapshot
    clock: Clock = field(default_factory=Clock)

    def read(self, cache: KVCache, layer: int, start: int = 0, end: int | None = None) -> None:
        """Gather rows `[start, end)` of a layer into the cache and turn what has moved, in place.

        A layer is turned while it is in the processor's cache, and what was read is let go of, so that the stored
        rows and their copy are never in memory together. The clock's steps are `load` and `align`.
        """
        one = slice(layer, layer + 1)
        with self.clock("load"):
            align.gather(cache, self.rows, self.snapshot.segments, start, end, one)
        with self.clock("align"):
            align.turn(cache, self.rows, self.engine.rotations, start, end, one)
        if layer % LAYERS_KEPT == LAYERS_KEPT - 1 or layer == cache.num_layers - 1:
            self.snapshot.release()

    def read_all(self, cache: KVCache, start: int = 0) -> None:
        """The rows from `start` on, of all layers."""
        for layer in range(cache.num_layers):
            self.read(cache, layer, start)


def streamed(stored: StoredRows, token_ids: np.ndarray, positions: np.ndarray, room: int | None) -> StreamedCache:
    """A cache for a pass over rows `positions`, which sees the rows up to the last of them.

    With `room` rows behind, for questions; None: nothing will be asked of it.
    """
    engine = stored.engine
    end = int(positions[-1]) + 1 if len(positions) else 0
    if engine.device.type == "cuda":
        return AheadCache(stored, token_ids, room or 0, end, Lane(engine.device))
    if room is None and end and engine.takes_one_pass(len(token_ids), len(positions)):
        return PassingCache(stored, token_ids, positions)
    return StreamedCache(stored, token_ids, room or 0, end)


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

    def complete(self) -> None:
        """Read what no pass has asked for: whole layers, and the rows behind `end`."""
        for layer in range(self.num_layers):
            self.ready(layer)
        self.stored.read_all(self, self.end)

    def taken(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of these rows, `[L, H, M, D]` on the CPU."""
        keys, values = (t[:, :, positions].contiguous().cpu() for t in (self.keys, self.values))
        return keys, values


class PassingCache(StreamedCache):
    """The rows `[0, end)` of one layer after another in the same memory: for one pass over rows `positions`.

    Those are kept as they are computed. No row can be asked anything afterwards.
    """

    def __init__(self, stored: StoredRows, token_ids: np.ndarray, positions: np.ndarray) -> None:
        super().__init__(stored, token_ids, 0, int(positions[-1]) + 1)
        self.positions = positions
        self._taken = [t.new_empty(*t.shape[:2], len(positions), t.shape[3]) for t in (self.keys, self.values)]

    def _allocate(self, stored: StoredRows, token_ids: np.ndarray, room: int, end: int) -> KVCache:
        tensors = []
        for like in (stored.snapshot.segments[0].keys, stored.snapshot.segments[0].values):
            layers, heads, _, dim = like.shape
            tensors.append(like.new_empty(1, heads, end, dim, device=stored.engine.device).expand(layers, -1, -1, -1))
        return KVCache(tensors[0], tensors[1], token_ids, stored.rows.origin.copy())

    def written(self, layer: int) -> None:
        for taken, tensor in zip(self._taken, (self.keys, self.values), strict=True):
            taken[layer] = tensor[layer][:, self.positions]

    def complete(self) -> None:
        raise ValueError("the layers of this cache have gone by")

    def taken(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if not np.array_equal(positions, self.positions):
            raise ValueError("only the rows of the pass were kept")
        keys, values = (taken.cpu() for taken in self._taken)
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
        align.gather(staged, stored.rows, stored.snapshot.segments, 0, self.end, one)
        with self._lane.entered():
            for mine, theirs in ((self.keys, staged.keys), (self.values, staged.values)):
                mine[layer, :, : self.end].copy_(theirs[layer], non_blocking=True)
            align.turn(self, stored.rows, stored.engine.rotations, 0, self.end, one)
            self._marks[layer] = self._lane.mark()
        return self._marks[layer]
