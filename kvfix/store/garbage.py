"""Files that nothing refers to: what interrupted commits and removed versions leave behind."""

from __future__ import annotations

import math
import os
import stat
import time
from collections import Counter
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
class Sweep:
    """What gc is to remove besides old temporary files."""

    min_age_s: float = MIN_AGE_S  # of files that nothing refers to
    keep: int | None = None  # versions to leave behind each head; None leaves all
    max_bytes: int | None = None  # of segments and records; previous versions go until they fit, the oldest first
    dry_run: bool = False


@dataclass(frozen=True)
class GcReport:
    """What gc removed, or would remove."""

    num_files: int
    bytes: int
    num_versions: int  # previous versions
    stored_bytes: int  # segments and records that are left
    over_bytes: int  # of them, beyond the size asked for: heads, and files that are too young


def collect(layout: Layout, manifest: Manifest, sweep: Sweep) -> GcReport:
    """Remove unreferenced segments, records and temporary files that are old, and the versions that are to go.

    Tombstones go after 30 days, when nothing of the document is left. A head is never removed. The caller holds the
    writer lock.
    """
    latest = time.time() - sweep.min_age_s
    shelf = _Shelf(layout, manifest)
    doomed = [path for path in shelf.unused() if _modified(path) <= latest]
    left = sum(shelf.sizes.values()) - sum(shelf.sizes[path] for path in doomed)
    unwanted, freed = [], []
    for record in sorted(shelf.previous, key=lambda record: not shelf.is_beyond(record, sweep.keep)):
        fits = sweep.max_bytes is None or left <= sweep.max_bytes
        if fits and not shelf.is_beyond(record, sweep.keep):
            break
        files_of_it = shelf.give_up(record)
        left -= sum(shelf.sizes[path] for path in files_of_it)
        freed += files_of_it
        unwanted.append(record)
    # records first: one without its segments would look like damage to a rebuild
    doomed = sorted(doomed + freed, key=lambda path: path.suffix != ".json")
    scraps = [part for folder in leftovers(layout) for part in _scraps(folder, latest)]
    removed = [shelf.sizes[path] for path in doomed] + [_size(part) for part in scraps if not part.is_dir()]
    if not sweep.dry_run:
        manifest.drop(unwanted)
        for path in doomed + scraps:
            _remove(path)
        old = datetime.now(timezone.utc) - timedelta(days=TOMBSTONE_DAYS)
        manifest.forget_tombstones(old.isoformat())
    over = 0 if sweep.max_bytes is None else max(0, left - sweep.max_bytes)
    return GcReport(len(removed), sum(removed), len(unwanted), left, over)


class _Shelf:
    """The segment and record files of a store, and which versions need them."""

    def __init__(self, layout: Layout, manifest: Manifest) -> None:
        kept, references = manifest.versions(), manifest.references()
        self.needs: dict[str, set[Path]] = {}
        for record in kept:
            names = references.get((record.corpus, record.doc_id, record.version), [])
            # the records are asked too: a damaged manifest must not cost a segment
            needed = {layout.object(name) for name in names} | set(_segments(layout, record))
            self.needs[record.record_id] = needed | {layout.record(record.record_id)}
        self._users = Counter(path for needed in self.needs.values() for path in needed)
        self.sizes = {path: _size(path) for path in stored(layout)}
        heads = {(head.corpus, head.doc_id): head.version for head in manifest.heads(None)}
        behind = [(record, heads.get((record.corpus, record.doc_id), 0) - record.version) for record in kept]
        self._behind = {record.record_id: num for record, num in behind}
        old = [record for record, num in behind if num > 0 and record.kind != "tombstone"]
        self.previous = sorted(old, key=lambda record: record.created_at)  # the oldest first

    def unused(self) -> list[Path]:
        """Files that no version needs."""
        return [path for path in self.sizes if not self._users[path]]

    def is_beyond(self, record: VersionRecord, keep: int | None) -> bool:
        """Whether a version is further behind its head than `keep`."""
        return keep is not None and self._behind[record.record_id] > keep

    def give_up(self, record: VersionRecord) -> list[Path]:
        """The files that nothing needs any more once a version has gone."""
        freed = []
        for path in sorted(self.needs[record.record_id]):
            self._users[path] -= 1
            if not self._users[path] and path in self.sizes:
                freed.append(path)
        return freed


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


def stored_bytes(layout: Layout) -> int:
    return sum(_size(path) for path in stored(layout))


def unreferenced(layout: Layout, manifest: Manifest) -> list[Path]:
    """Segment and record files that no version of the manifest needs."""
    return _Shelf(layout, manifest).unused()


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


def _scraps(folder: Path, latest: float) -> list[Path]:
    """All of a temporary folder, what is inside first; nothing if any of it is young."""
    parts = [folder, *folder.rglob("*")]
    return parts[::-1] if max(_modified(part) for part in parts) <= latest else []


def _size(path: Path) -> int:
    """The size of a file; one that has gone has none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _modified(path: Path) -> float:
    """When a file was changed last; one that has gone is not old."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


def _remove(path: Path) -> None:
    """Remove a file or an empty directory."""
    with files.while_writing(path):
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()
