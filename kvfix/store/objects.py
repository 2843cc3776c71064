"""Immutable segment files: tensors in safetensors format, named by the sha256 of the whole file."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvfix.store import files
from kvfix.store.damage import DamagedFileError
from kvfix.store.layout import Layout
from kvfix.store.records import SegmentRef

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 1 << 20
HEADER_ROOM_BYTES = 4096
SMALL_BYTES = 16 << 20
OS_ERROR = re.compile(r"os error (\d+)")


def try_write(layout: Layout, tensors: dict[str, torch.Tensor]) -> int:
    """Write a segment, but drop it instead of naming it; its size in bytes."""
    with written(layout, tensors, "base", 0) as (new, segment):
        with files.while_writing(new):
            files.sync_directory(new.parent)
        return segment.size


@contextmanager
def written(
    layout: Layout, tensors: dict[str, torch.Tensor], kind: str, num_rows: int
) -> Iterator[tuple[Path, SegmentRef]]:
    """A durable temporary file of tensors (contiguous, on the CPU), gone afterwards unless it was given its name.

    That is known only when all is written. Raises StoreNotWritableError.
    """
    files.need_space(layout.root, sum(tensor.nbytes for tensor in tensors.values()) + HEADER_ROOM_BYTES)
    with files.temporary(layout) as new:
        with files.while_writing(new):
            _serialise(tensors, new)
            files.sync_file(new)
        size = new.stat().st_size
        name, checksums = _hashes(new, tensors, size)
        yield new, SegmentRef(name, kind, size, num_rows, checksums)


def _hashes(path: Path, tensors: dict[str, torch.Tensor], size: int) -> tuple[str, dict[str, str]]:
    """The checksum of the file and those of its tensors, at once where that is worth a thread."""
    if size < SMALL_BYTES:
        return hash_file(path), checksums_of(tensors)
    with ThreadPoolExecutor(1) as pool:
        checksums = pool.submit(checksums_of, tensors)
        return hash_file(path), checksums.result()


def _serialise(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file whose mode follows the umask (the library's own choice is 0600)."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    mode = files.create(path)
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = OS_ERROR.search(str(error))
        if not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    os.chmod(path, mode)


def hash_file(path: Path) -> str:
    """The sha256 of a file's content."""
    whole = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
    return whole.hexdigest()


def checksums_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in sorted(tensors.items())}


def checksum(tensor: torch.Tensor) -> str:
    """The sha256 of a contiguous tensor's bytes."""
    import torch

    if tensor.numel() == 0:
        return hashlib.sha256().hexdigest()
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def open_segment(layout: Layout, segment: SegmentRef) -> dict[str, torch.Tensor]:
    """A segment's tensors, mapped privately: pages are read when they are used, writes never reach the file.

    FileNotFoundError if the file is gone, DamagedFileError naming it if it cannot be what was written.
    """
    from safetensors import SafetensorError, safe_open

    path = layout.object(segment.name)
    check_shape(layout, path, segment.size)
    with _reading(path):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise DamagedFileError(path, str(error)) from error
    if sorted(tensors) != sorted(segment.checksums):
        raise DamagedFileError(path, "it holds other tensors than its record says")
    return tensors


def check_shape(layout: Layout, path: Path, size: int) -> None:
    """Raise DamagedFileError unless the file has its recorded size and a header that fits into it."""
    with _reading(path):
        found = files.file_size(layout, path)
        if found != size:
            raise DamagedFileError(path, f"it has {found} bytes instead of {size}")
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
    if header > min(MAX_HEADER_BYTES, size - 8):
        raise DamagedFileError(path, f"its header claims {header} bytes")


def check_tensors(path: Path, tensors: dict[str, torch.Tensor], segment: SegmentRef) -> None:
    """Raise DamagedFileError if a tensor's checksum is not the recorded one."""
    for name, tensor in tensors.items():
        if checksum(tensor) != segment.checksums[name]:
            raise DamagedFileError(path, f"the checksum of {name!r} differs")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFileError(path, f"it cannot be read ({error.strerror or error})") from error
