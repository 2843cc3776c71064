"""A stored version as a cache in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix import align

if TYPE_CHECKING:
    from kvfix.core import KVCache, RowMap
    from kvfix.engine import Engine
    from kvfix.store import Snapshot

ROOM_ROWS = 512
LAYERS_AT_ONCE = 8


def read_rows(cache: KVCache, rows: RowMap, snapshot: Snapshot, start: int = 0, end: int | None = None) -> None:
    """Gather stored rows `[start, end)` into the cache, in place, some layers at a time.

    What was read is let go of, so that the stored rows and their copy are never in memory together.
    """
    for first in range(0, cache.num_layers, LAYERS_AT_ONCE):
        align.gather(cache, rows, snapshot.segments, start, end, slice(first, first + LAYERS_AT_ONCE))
        snapshot.release()


def load_cache(engine: Engine, snapshot: Snapshot, room: int = ROOM_ROWS) -> KVCache:
    """A fresh cache of a stored version, every key at its present position, with room for a query."""
    cache = align.allocate(snapshot.segments[0], snapshot.rows, snapshot.token_ids, room, engine.device)
    read_rows(cache, snapshot.rows, snapshot)
    align.turn(cache, snapshot.rows, engine.rotations)
    return cache
