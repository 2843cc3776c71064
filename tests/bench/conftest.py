"""Ceilings made by hand, where a test is about something else, and words enough for texts of tiny tokenizers."""

import pytest

from kvfix.bench.ceilings import Ceilings
from kvfix.bench.disk import DiskCeilings

CEILINGS = Ceilings(operations_per_s=1e11, read_bytes_per_s=1e10, copy_bytes_per_s=2e10)
DISK = DiskCeilings(1e9, 1.0, 5e9, 1e9, 2e10)


@pytest.fixture
def single_words(monkeypatch):
    """The tiny tokenizers know two words that follow a space; letters that they never join are enough of them."""
    monkeypatch.setattr("kvfix.bench.texts.single_tokens", lambda engine: iter("bcdfgjklmpqsuvwxyz"))


@pytest.fixture
def given_ceilings(monkeypatch):
    """Nothing of the machine is measured."""
    monkeypatch.setattr(Ceilings, "of", classmethod(lambda cls, engine, linears: CEILINGS))
    monkeypatch.setattr("kvfix.bench.store.measure_disk", lambda folder, copied: DISK)
    monkeypatch.setattr("kvfix.bench.store.bandwidths", lambda engine, device: (1e10, 2e10))
    return CEILINGS
