"""Files that nothing refers to: what interrupted commits and removed versions leave behind."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from kvfix.store import files
from kvfix.store.layout import Layout, is_digest
from kvfix.store.manifest import Manifest

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
    removed = 0
    num_files = 0
    latest = time.time() - min_age_s
    for path in [*unreferenced(layout, manifest), *leftovers(layout)]:
        status = path.lstat()
        if status.st_mtime > latest:
            continue
        with files.while_writing(path):
            path.unlink()
        num_files += 1
        removed += status.st_size
    _remove_empty(layout.temporary, latest)
    old = datetime.now(timezone.utc) - timedelta(days=TOMBSTONE_DAYS)
    manifest.forget_tombstones(old.isoformat())
    return GcReport(num_files, removed)


def stored(layout: Layout) -> Iterator[Path]:
    """Every segment and record file that lies where its name says."""
    for kind in ("objects", "records"):
        layout.refuse_symlinks(layout.root / kind)
        for folder, _, names in os.walk(layout.root / kind):
            for name in sorted(names):
                path = Path(folder, name)
                digest = path.stem
                if is_digest(digest) and path in (layout.object(digest), layout.record(digest)):
                    yield path


def unreferenced(layout: Layout, manifest: Manifest) -> list[Path]:
    """Segment and record files that no version of the manifest needs."""
    needed = {layout.record(record.record_id) for record in manifest.versions()}
    needed |= {layout.object(name) for names in manifest.references().values() for name in names}
    return [path for path in stored(layout) if path not in needed]


def leftovers(layout: Layout) -> list[Path]:
    """Temporary files of writers that were killed."""
    layout.refuse_symlinks(layout.temporary)
    return [Path(folder, name) for folder, _, names in os.walk(layout.temporary) for name in sorted(names)]


def _remove_empty(temporary: Path, latest: float) -> None:
    for folder in temporary.iterdir():
        if folder.lstat().st_mtime <= latest and folder.is_dir() and not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
