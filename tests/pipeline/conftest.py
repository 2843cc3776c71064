from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.pipeline.desk import Desk

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path():
    """A folder in memory where there is such a place: every commit is synced."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvfix-", dir=place) as folder:
        yield Path(folder).resolve()


@pytest.fixture
def desk_of(tmp_path, gated):
    """`desk_of(name)` is an empty store with a gated zoo model, or with an engine."""
    desks = []

    def desk(model="llama", **settings) -> Desk:
        engine = gated(model, **settings) if isinstance(model, str) else model
        desks.append(Desk(tmp_path / f"desk{len(desks)}", engine))
        return desks[-1]

    yield desk
    for one in desks:
        one.store.close()


@pytest.fixture
def desk(desk_of) -> Desk:
    return desk_of("llama")
