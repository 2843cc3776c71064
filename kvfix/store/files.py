"""Durable files: written under a temporary name, fsynced, then renamed; nothing is left behind on failure."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfix.errors import StoreNotWritableError
from kvfix.store.damage import DamagedFileError
from kvfix.store.layout import Layout

SPACE_MARGIN_BYTES = 1 << 18  # for the record, the manifest's journal and directory blocks
MAX_SMALL_BYTES = 64 << 20


@contextmanager
def while_writing(path: Path) -> Iterator[None]:
    """Turn what the system says while `path` is written into StoreNotWritableError."""
    try:
        yield
    except OSError as error:
        raise not_writable(path, error.strerror or str(error), error.errno) from error


def not_writable(path: Path, reason: str, code: int | None = None) -> StoreNotWritableError:
    """The error for a failed write, with the way out where the reason has one."""
    hint = {
        errno.ENOSPC: " Free some space, or run: kvfix gc",
        errno.EDQUOT: " Free some of the quota, or run: kvfix gc",
    }.get(code or 0, "")
    return StoreNotWritableError(f"Cannot write {path}: {reason}. The old entry is kept.{hint}")


def need_space(directory: Path, num_bytes: int) -> None:
    """Raise StoreNotWritableError unless `num_bytes` and a margin are free where `directory` lies."""
    with while_writing(directory):
        free = shutil.disk_usage(directory).free
    if free < num_bytes + SPACE_MARGIN_BYTES:
        reason = f"{num_bytes + SPACE_MARGIN_BYTES} bytes are needed and {free} are free"
        raise not_writable(directory, reason, errno.ENOSPC)


def make_directory(path: Path) -> None:
    """Make one directory, its entry durable; one that exists is left as it is."""
    if path.is_dir():
        return
    with while_writing(path):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


@contextmanager
def temporary(layout: Layout) -> Iterator[Path]:
    """A new path in a directory of its own, both gone afterwards whatever happens."""
    folder = layout.temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with while_writing(folder):
            layout.refuse_symlinks(layout.temporary)
            folder.mkdir()
        yield folder / "new"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def create(path: Path) -> int:
    """Make an empty file whose mode follows the umask; its mode."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return os.fstat(descriptor).st_mode & 0o7777
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def publish(layout: Layout, new: Path, final: Path) -> None:
    """Give a finished, fsynced file its lasting name; a file of that name is replaced."""
    layout.refuse_symlinks(final)
    make_directory(final.parent)
    with while_writing(final):
        os.replace(new, final)
        sync_directory(final.parent)


def write_bytes(layout: Layout, final: Path, content: bytes) -> None:
    """Write a small file durably and atomically."""
    need_space(layout.root, len(content))
    with temporary(layout) as new:
        with while_writing(final):
            create(new)
            new.write_bytes(content)
            sync_file(new)
        publish(layout, new, final)


def file_size(layout: Layout, path: Path) -> int:
    """The size of a regular file of the store; FileNotFoundError, or DamagedFileError for anything else."""
    layout.refuse_symlinks(path)
    status = os.lstat(path)
    if not path.is_file():
        raise DamagedFileError(path, "it is not a file")
    return status.st_size


def read_bytes(layout: Layout, path: Path) -> bytes:
    """A small file's content; FileNotFoundError where there is none, DamagedFileError if it cannot be read."""
    try:
        if file_size(layout, path) > MAX_SMALL_BYTES:
            raise DamagedFileError(path, f"it is larger than {MAX_SMALL_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFileError(path, f"it cannot be read ({error.strerror or error})") from error
