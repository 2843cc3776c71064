"""A stored version as a cache in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix import align
from kvfix.errors import UsageError
from kvfix.pipeline.clock import Clock

if TYPE_CHECKING:
    from kvfix.core import KVCache, RowMap
    from kvfix.engine import Engine
    from kvfix.store import Snapshot

ROOM_ROWS = 512
LAYERS_KEPT = 8


def read_rows(
    engine: Engine,
    cache: KVCache,
    rows: RowMap,
    snapshot: Snapshot,
    start: int = 0,
    end: int | None = None,
    clock: Clock | None = None,
) -> None:
    """Gather stored rows `[start, end)` into the cache and turn what has moved, in place, layer by layer.

    A layer is turned while it is in the processor's cache, and what was read is let go of, so that the stored rows
    and their copy are never in memory together. The clock's steps are `load` and `align`.
    """
    clock = clock or Clock()
    for layer in range(cache.num_layers):
        one = slice(layer, layer + 1)
        with clock("load"):
            align.gather(cache, rows, snapshot.segments, start, end, one)
        with clock("align"):
            align.turn(cache, rows, engine.rotations, start, end, one)
        if layer % LAYERS_KEPT == LAYERS_KEPT - 1 or layer == cache.num_layers - 1:
            snapshot.release()


def load_cache(engine: Engine, snapshot: Snapshot, room: int = ROOM_ROWS) -> KVCache:
    """A fresh cache of a stored version, every key at its present position, with room for a query.

    Raises `UsageError` for an empty document.
    """
    if not snapshot.segments:
        raise UsageError(f"{snapshot.record.doc_id} is empty; it has no cache")
    cache = align.allocate(snapshot.segments[0], snapshot.rows, snapshot.token_ids, room, engine.device)
    read_rows(engine, cache, snapshot.rows, snapshot)
    return cache
