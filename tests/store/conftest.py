from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvfix.store import Store

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path():
    """A folder in memory where there is such a place: these tests sync thousands of files."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvfix-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store", create=True) as opened:
        yield opened
