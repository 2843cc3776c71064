"""Making a store, and telling a store from a directory that is none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvfix.errors import StoreDamagedError, StoreMissingError, UsageError
from kvfix.store import files
from kvfix.store.layout import DIRECTORIES, Layout
from kvfix.store.manifest import Manifest

OWN_NAMES = {*DIRECTORIES, "manifest.sqlite", "manifest.sqlite-journal", "lock", "lock.holder"}
SET_ASIDE = ".damaged-"  # and the time, behind the name of a manifest that was replaced
HARMLESS_NAMES = {".gitkeep", ".gitignore", "lost+found"}


def require_store(layout: Layout) -> None:
    """StoreMissingError if there is no store here, StoreDamagedError if its manifest has gone."""
    if has_manifest(layout):
        layout.refuse_symlinks(layout.manifest)
        return
    if any((layout.root / "records").glob("*/*.json")):
        raise StoreDamagedError(
            f"{layout.manifest} is missing. Its entries can be read back from the records: kvfix fsck --rebuild"
        )
    raise StoreMissingError(f"There is no store at {layout.root}. Make one with: kvfix build PATH")


def create_store(layout: Layout, manifest: Manifest) -> None:
    """Make the directories and the manifest where there are none yet; UsageError in a foreign directory."""
    if has_manifest(layout):
        return
    check_vacant(layout.root)
    with files.while_writing(layout.root):
        layout.root.mkdir(parents=True, exist_ok=True)
    for name in DIRECTORIES:
        files.make_directory(layout.root / name)
    with files.while_writing(layout.manifest):
        with contextlib.suppress(FileExistsError):
            files.create(layout.manifest)
        files.sync_directory(layout.root)
    manifest.create()


def has_manifest(layout: Layout) -> bool:
    """Whether the manifest is there; an empty one belongs to a creation that was interrupted."""
    try:
        return os.lstat(layout.manifest).st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreDamagedError(f"{layout.manifest} cannot be read: {error.strerror}.") from error


def check_vacant(root: Path) -> None:
    """UsageError if the directory holds anything that is not kvfix's, StoreDamagedError if it holds entries."""
    if not root.exists():
        return
    if not root.is_dir():
        raise UsageError(f"{root} is not a directory, so it cannot be a store.")
    try:
        names = set(os.listdir(root))
    except OSError as error:
        raise StoreDamagedError(f"{root} cannot be read: {error.strerror}.") from error
    foreign = sorted(
        name for name in names - OWN_NAMES - HARMLESS_NAMES if not name.startswith(f"manifest.sqlite{SET_ASIDE}")
    )
    if foreign:
        raise UsageError(f"{root} is not empty and is no store (it holds {foreign[0]}): choose another --store.")
    if any((root / "records").glob("*/*.json")):
        require_store(Layout(root))
