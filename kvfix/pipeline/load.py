"""A stored version as a cache in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix import align
from kvfix.errors import UsageError
from kvfix.pipeline.stream import StoredRows

if TYPE_CHECKING:
    from kvfix.core import KVCache
    from kvfix.engine import Engine
    from kvfix.store import Snapshot

ROOM_ROWS = 512


def load_cache(engine: Engine, snapshot: Snapshot, room: int = ROOM_ROWS) -> KVCache:
    """A fresh cache of a stored version, every key at its present position, with room for a query.

    Raises `UsageError` for an empty document.
    """
    if not snapshot.segments:
        raise UsageError(f"{snapshot.record.doc_id} is empty; it has no cache")
    cache = align.allocate(snapshot.segments[0], snapshot.rows, snapshot.token_ids, room, engine.device)
    StoredRows(engine, snapshot.rows, snapshot).read_all(cache)
    return cache
