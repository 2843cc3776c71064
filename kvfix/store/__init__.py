"""Stored caches: immutable segments, an index over them, and versions that appear whole or not at all."""

from kvfix.store.audit import Damage
from kvfix.store.garbage import GcReport
from kvfix.store.rebuild import Loss, Rebuilt
from kvfix.store.records import Detail, SegmentRef, VersionRecord, should_fold
from kvfix.store.snapshot import Segment, Snapshot
from kvfix.store.store import Store

__all__ = [
    "Damage",
    "Detail",
    "GcReport",
    "Loss",
    "Rebuilt",
    "Segment",
    "SegmentRef",
    "Snapshot",
    "Store",
    "VersionRecord",
    "should_fold",
]
