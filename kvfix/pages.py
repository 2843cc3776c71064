"""Memory pages of tensors that are mapped from files: letting go of those that were read."""

from __future__ import annotations

import mmap
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def forget(mapped: torch.Tensor) -> None:
    """Drop a mapped tensor's pages from memory, all that lie wholly within it; a courtesy, never an error.

    Only for tensors of a private mapping that nobody has written to: the file is what their pages are read from.
    """
    page = mmap.PAGESIZE
    start, end = -(-mapped.data_ptr() // page) * page, (mapped.data_ptr() + mapped.nbytes) // page * page
    advise, dont_need = _madvise(), getattr(mmap, "MADV_DONTNEED", None)
    if advise is not None and dont_need is not None and end > start:
        advise(start, end - start, dont_need)


class MappedFiles:
    """Where this process has files mapped at the moment; nowhere where the system does not tell."""

    def __init__(self) -> None:
        try:
            with open("/proc/self/maps") as maps:
                fields = [line.split(maxsplit=5) for line in maps]
        except OSError:
            fields = []
        named = [entry[0].split("-") for entry in fields if len(entry) == 6 and entry[5].startswith("/")]
        self._ranges = [(int(start, 16), int(end, 16)) for start, end in named]

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether all of a contiguous tensor is mapped from a file."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(low <= start and end <= high for low, high in self._ranges)


@cache
def _madvise() -> Any:
    import ctypes

    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
