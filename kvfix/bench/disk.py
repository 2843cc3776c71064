"""What a disk and the memory beside it can do at best, measured in one directory, and the bounds that follow."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LARGE_BYTES = 64 << 20
SMALL_BYTES = 4 << 10
LARGE_TRIES, SMALL_TRIES = 3, 12
# a commit's segment, its record and its transaction: each is durable by itself
COMMIT_WRITES = 3


class DiskCeilings(NamedTuple):
    """The best that was measured."""

    write_bytes_per_s: float  # a large file in order, with an fsync
    small_write_ms: float  # a small file made durable: its fsync, a rename, the directory's fsync
    file_read_bytes_per_s: float  # a file that was just written, so from memory
    hash_bytes_per_s: float  # sha256 by one thread
    copy_bytes_per_s: float  # in memory, read and written bytes together

    def better(self, other: DiskCeilings) -> DiskCeilings:
        """The better of two measurements: what was possible once is possible."""
        pairs = zip(self._fields, self, other, strict=True)
        return DiskCeilings(*((min if name.endswith("_ms") else max)(one, two) for name, one, two in pairs))

    def bound(self, kind: str, num_bytes: int) -> dict[str, Any]:
        """`bound_ms` of a `commit`, `load`, `check` or `transaction` of so many bytes, and what sets it."""
        return {
            "commit": self._commit,
            "load": self._load,
            "check": self._check,
            "transaction": lambda num_bytes: _bound(disk=self.small_write_ms),
        }[kind](num_bytes)

    def _commit(self, num_bytes: int) -> dict[str, Any]:
        """So many bytes written and three names made durable; all of it hashed."""
        disk = num_bytes / self.write_bytes_per_s * 1e3 + COMMIT_WRITES * self.small_write_ms
        return _bound(disk=disk, hash=num_bytes / self.hash_bytes_per_s * 1e3)

    def _load(self, num_bytes: int) -> dict[str, Any]:
        """So many bytes of rows copied from files in memory into a cache."""
        return _bound(memory=2 * num_bytes / self.copy_bytes_per_s * 1e3)

    def _check(self, num_bytes: int) -> dict[str, Any]:
        """So many bytes read and hashed once."""
        read, hashed = num_bytes / self.file_read_bytes_per_s, num_bytes / self.hash_bytes_per_s
        return _bound(memory=read * 1e3, hash=hashed * 1e3)


def _bound(**candidates: float) -> dict[str, Any]:
    name = max(candidates, key=lambda name: candidates[name])
    return {"bound_ms": candidates[name], "bound_by": name}


def measure_disk(folder: Path, copy_bytes_per_s: float) -> DiskCeilings:
    """Measure now, in files of `folder` that are gone afterwards. Raises `OSError` where it cannot be written."""
    content = np.random.default_rng(0).bytes(LARGE_BYTES)
    large = folder / "large"
    write_s = min(_seconds(lambda: _write(large, content)) for _ in range(LARGE_TRIES))
    target = bytearray(LARGE_BYTES)
    read_s = min(_seconds(lambda: _read(large, target)) for _ in range(LARGE_TRIES))
    hash_s = min(_seconds(lambda: hashlib.sha256(content).digest()) for _ in range(LARGE_TRIES))
    large.unlink()
    small_s = min(_seconds(lambda: _write_small(folder, content[:SMALL_BYTES])) for _ in range(SMALL_TRIES))
    (folder / "small").unlink()
    rates = (LARGE_BYTES / write_s, small_s * 1e3, LARGE_BYTES / read_s, LARGE_BYTES / hash_s)
    return DiskCeilings(*rates, copy_bytes_per_s)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def _write_small(folder: Path, content: bytes) -> None:
    """As the store makes a record durable."""
    _write(folder / "new", content)
    os.replace(folder / "new", folder / "small")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, target: bytearray) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(target)
