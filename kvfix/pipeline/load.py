"""A stored version as a cache in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix import align

if TYPE_CHECKING:
    from kvfix.core import KVCache
    from kvfix.engine import Engine
    from kvfix.store import Snapshot

ROOM_ROWS = 512


def load_cache(engine: Engine, snapshot: Snapshot, room: int = ROOM_ROWS) -> KVCache:
    """A fresh cache of a stored version, every key at its present position, with room for a query."""
    cache = align.allocate(snapshot.segments[0], snapshot.rows, snapshot.token_ids, room, engine.device)
    align.gather(cache, snapshot.rows, snapshot.segments)
    align.turn(cache, snapshot.rows, engine.rotations)
    return cache
