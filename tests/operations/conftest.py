"""Every campaign has a site of its own: in memory, or on a disk that really syncs where there is time for that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.operations.site import LONG, Site

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def tiny(zoo: Callable[..., Path]) -> str:
    return str(zoo("llama", max_position_embeddings=2048))


@pytest.fixture
def folder() -> Iterator[Path]:
    place = MEMORY if MEMORY.is_dir() and not LONG else None
    made = Path(tempfile.mkdtemp(prefix="kvfix-", dir=place)).resolve()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def site(folder: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> Site:
    # forked children must not wait for threads that they do not have
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return Site(folder, tiny)
