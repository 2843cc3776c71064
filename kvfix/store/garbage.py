"""Files that nothing refers to: what interrupted commits and removed versions leave behind."""

from __future__ import annotations

import math
import os
import stat
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from kvfix.errors import StoreDamagedError
from kvfix.store import files
from kvfix.store.layout import Layout, is_digest
from kvfix.store.manifest import Manifest
from kvfix.store.records import VersionRecord, decode

MIN_AGE_S = 3600.0
TOMBSTONE_DAYS = 30


@dataclass(frozen=True)
class GcReport:
    """What gc removed."""

    num_files: int
    bytes: int


def collect(layout: Layout, manifest: Manifest, min_age_s: float) -> GcReport:
    """Remove unreferenced segments, records and temporary files older than `min_age_s`.

    Tombstones go after 30 days, when nothing of the document is left. The caller holds the writer lock.
    """
    latest = time.time() - min_age_s
    removed = [_remove(path) for path in unreferenced(layout, manifest) if _modified(path) <= latest]
    for folder in leftovers(layout):
        parts = [folder, *folder.rglob("*")]
        if max(_modified(part) for part in parts) <= latest:
            removed += [_remove(part) for part in reversed(parts)]
    old = datetime.now(timezone.utc) - timedelta(days=TOMBSTONE_DAYS)
    manifest.forget_tombstones(old.isoformat())
    sizes = [size for size in removed if size is not None]
    return GcReport(len(sizes), sum(sizes))


def stored(layout: Layout) -> list[Path]:
    """Every segment and record file that lies where its name says."""
    found = []
    for kind in ("objects", "records"):
        layout.refuse_symlinks(layout.root / kind)
        for folder, _, names in os.walk(layout.root / kind):
            for name in sorted(names):
                path = Path(folder, name)
                digest = path.stem
                if is_digest(digest) and path in (layout.object(digest), layout.record(digest)):
                    found.append(path)
    return found


def unreferenced(layout: Layout, manifest: Manifest) -> list[Path]:
    """Segment and record files that no version of the manifest needs."""
    kept = manifest.versions()
    needed = {layout.record(record.record_id) for record in kept}
    needed |= {layout.object(name) for names in manifest.references().values() for name in names}
    # the records are asked too: a damaged manifest must not cost a segment
    needed |= {path for record in kept for path in _segments(layout, record)}
    return [path for path in stored(layout) if path not in needed]


def _segments(layout: Layout, record: VersionRecord) -> list[Path]:
    """The segments that a record file names; none if it cannot be read."""
    path = layout.record(record.record_id)
    try:
        return [layout.object(ref.name) for ref in decode(files.read_bytes(layout, path), path).segments]
    except (StoreDamagedError, FileNotFoundError):
        return []


def leftovers(layout: Layout) -> list[Path]:
    """What writers were writing when they were killed."""
    layout.refuse_symlinks(layout.temporary)
    return sorted(layout.temporary.iterdir())


def _modified(path: Path) -> float:
    """When a file was changed last; one that has gone is not old."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


def _remove(path: Path) -> int | None:
    """Remove a file, whose size is returned, or an empty directory."""
    status = path.lstat()
    with files.while_writing(path):
        if stat.S_ISDIR(status.st_mode):
            path.rmdir()
            return None
        path.unlink()
    return status.st_size
