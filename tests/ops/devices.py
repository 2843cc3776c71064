"""Where kernels run in these tests, and how much of a table is tried.

Without a GPU Triton interprets them on the CPU (tests/conftest.py says so before Triton is imported). With one,
TRITON_INTERPRET=0 is the default and the same tests run there. KVFIX_LONG=1 tries whole tables instead of a slice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from kvfix.ops.backend import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
LONG = bool(os.environ.get("KVFIX_LONG"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Entry = TypeVar("Entry")


def slice_of(table: Sequence[Entry], every: int) -> list[Entry]:
    """The table, or every so many-th entry of it."""
    return list(table) if LONG else list(table[::every])


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
