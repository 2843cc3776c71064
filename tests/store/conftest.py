from __future__ import annotations

import pytest

from kvfix.store import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store", create=True) as opened:
        yield opened
