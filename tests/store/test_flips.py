"""Whatever single byte of a store changes: verify names it, or nothing that is read from the store differs.

KVFIX_LONG=1 tries a thousand bytes instead of sixty.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from kvfix.errors import KVFixError, StoreDamagedError
from kvfix.store import Store
from tests.store.helpers import KEY, build, edit
from tests.store.test_rebuild import state

NUM_FLIPS = 1000 if os.environ.get("KVFIX_LONG") else 60
KINDS = ("objects/*/*", "records/*/*", "manifest.sqlite")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Two documents, of which one has been edited and one removed and built again, and a gate report."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with Store.open(path, create=True) as store:
        edit(store, edit(store, build(store, num_rows=6)), text="and again", seed=2)
        build(store, doc_id="b.md", num_rows=4, seed=3)
        store.remove("/corpus", "b.md")
        build(store, doc_id="b.md", num_rows=5, seed=4)
        store.save_gate(KEY.fingerprint, "sdpa", {"error": 1e-7})
        assert store.verify() == []
    return path


def read(path: Path) -> object:
    """Everything that a reader can learn, or the error that keeps it from that."""
    try:
        return state(path)
    except KVFixError as error:
        return error


def verified(path: Path) -> bool:
    """Whether verify finds the store as it was written; an error of exit 6 that names a file is a finding, too."""
    try:
        with Store.open(path, read_only=True) as store:
            return store.verify() == []
    except StoreDamagedError as error:
        return str(path) not in error.message


def test_a_flipped_byte_is_found_or_without_effect(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "store")
    before = read(path)
    generator = random.Random(NUM_FLIPS)
    files = {kind: sorted(path.glob(kind)) for kind in KINDS}
    outcomes: Counter[str] = Counter()
    for number in range(NUM_FLIPS):
        kind = KINDS[number % 3]
        file = generator.choice(files[kind])
        sane = file.read_bytes()
        offset, mask = generator.randrange(len(sane)), generator.randrange(1, 256)
        file.write_bytes(sane[:offset] + bytes([sane[offset] ^ mask]) + sane[offset + 1 :])
        if verified(path):
            assert read(path) == before, (file.name, offset, mask)
            assert kind == "manifest.sqlite", (file.name, offset, mask)
            outcomes["without effect"] += 1
        else:
            outcomes["found"] += 1
        for left in path.glob("manifest.sqlite-*"):
            left.unlink()
        file.write_bytes(sane)
    assert read(path) == before
    assert outcomes["found"] >= NUM_FLIPS * 2 // 3
    print(dict(outcomes))


def test_every_byte_of_the_settings_and_of_the_heads_counts(sound, tmp_path):
    """The pages of the manifest that no record repeats: each byte that is in use, flipped in its lowest bit."""
    path = shutil.copytree(sound, tmp_path / "store")
    manifest = path / "manifest.sqlite"
    sane, before = manifest.read_bytes(), read(path)
    for word in (b"format1", b"keep1", b"seal"):
        start = sane.index(word)
        for offset in range(start, start + len(word)):
            manifest.write_bytes(sane[:offset] + bytes([sane[offset] ^ 1]) + sane[offset + 1 :])
            assert not verified(path) or read(path) == before, (word, offset - start)
