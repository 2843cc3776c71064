"""A stored version as a cache in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvfix import align

if TYPE_CHECKING:
    from kvfix.core import KVCache
    from kvfix.engine import Engine
    from kvfix.probes import Probe
    from kvfix.store import Snapshot

ROOM_ROWS = 512
MAX_NEW = 16


def load_cache(engine: Engine, snapshot: Snapshot, room: int = ROOM_ROWS) -> KVCache:
    """A fresh cache of a stored version, every key at its present position, with room for a query."""
    cache = align.allocate(snapshot.segments[0], snapshot.rows, snapshot.token_ids, room, engine.device)
    align.gather(cache, snapshot.rows, snapshot.segments)
    align.turn(cache, snapshot.rows, engine.rotations)
    return cache


def room_for(probes: Sequence[Probe]) -> int:
    """Rows behind a document that its probes need: all at once where that is little, else at least the longest."""
    longest = [len(p.query_ids) + max(len(p.new_ids), len(p.old_ids), MAX_NEW) for p in probes]
    return max([min(ROOM_ROWS, 2 * sum(longest)), *longest], default=0)
