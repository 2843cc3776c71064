"""A corpus that is written while passes read it: half-written, replaced, cut, gone, growing files.

A cache always belongs to a text that its file has had, whole; and once the files rest, one pass makes it right.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvfix.engine import Engine
from kvfix.engine.gate import deviation
from kvfix.pipeline.load import load_cache
from kvfix.store import Store
from tests.operations.site import LONG, Site, ended, forked, in_process
from tests.tolerances import CACHE

NUM_PASSES = 60 if LONG else 4
NAMES = ("a.md", "b.md", "c.md", "d.md", "e.md")
PAUSE_S = 0.02


class Scribe:
    """Writes files in every way that editors and copying programs do; before a text shows, its checksum is noted."""

    def __init__(self, corpus: Path, notes: Path, seed: int) -> None:
        self.corpus, self.notes, self.chance, self.serial = corpus, notes, random.Random(seed), 0

    def text(self, num_lines: int = 4) -> bytes:
        self.serial += 1
        return "".join(f"Café {self.serial}: “{n}” bells after noon.\n" for n in range(num_lines)).encode()

    def note(self, content: bytes) -> bytes:
        with open(self.notes, "a") as notes:
            notes.write(hashlib.sha256(content).hexdigest() + "\n")
        return content

    def write_on(self) -> None:
        while True:
            path = self.corpus / self.chance.choice(NAMES)
            self.chance.choice([self.halve, self.replace, self.cut, self.remove, self.grow, self.overwrite])(path)
            self.pause()

    def pause(self) -> None:
        time.sleep(self.chance.uniform(0, PAUSE_S))

    def halve(self, path: Path) -> None:
        """Written in two parts, with a pause between them, which may be inside a character."""
        content = self.text()
        middle = self.chance.randrange(1, len(content))
        self.note(b""), self.note(content[:middle]), self.note(content)
        with open(path, "wb", buffering=0) as file:
            file.write(content[:middle])
            self.pause()
            file.write(content[middle:])

    def replace(self, path: Path) -> None:
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(self.note(self.text()))
        new.rename(path)

    def cut(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        with open(path, "ab") as file:
            length = self.chance.randrange(len(content) + 1)
            self.note(content[:length])
            file.truncate(length)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.pause()
        if not path.exists() and self.chance.random() < 0.7:
            self.replace(path)

    def grow(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        if len(content) > 800:
            return self.replace(path)
        self.note(content)
        with open(path, "ab", buffering=0) as file:
            for _ in range(3):
                content += (line := self.text(1))
                self.note(content)
                file.write(line)
                self.pause()
        return None

    def overwrite(self, path: Path) -> None:
        """One byte in its place, the times put back: only reading the file shows it."""
        if path.exists() and path.stat().st_size > 6:
            before, content = path.stat(), bytearray(path.read_bytes())
            content[0] = self.chance.choice(b"BDGH")
            self.note(bytes(content))
            with open(path, "r+b", buffering=0) as file:
                file.write(content[:1])
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture(scope="module")
def engine(tiny: str) -> Engine:
    return Engine.open(tiny)


def test_what_is_cached_was_there_and_what_rests_is_right(site: Site, engine: Engine):
    notes = site.root / "notes"
    scribe = Scribe(site.corpus, notes, seed=NUM_PASSES)
    for path in site.corpus.iterdir():
        path.unlink()
    for name in NAMES:
        scribe.replace(site.corpus / name)
    child = forked(lambda: scribe.write_on(), site.root / "scribe.log")
    counts: Counter[int] = Counter()
    try:
        for _ in range(NUM_PASSES):
            counts[in_process(site.sync("--allow-empty"))] += 1
            check(site, engine, set(notes.read_text().splitlines()))
    finally:
        code = ended(child, 0.0)
    assert code == -signal.SIGKILL, (site.root / "scribe.log").read_text()
    print(dict(counts))
    assert counts.keys() <= {0, 3}
    last = {path.name: decoded(path) for path in site.corpus.glob("*.md")}
    assert in_process(site.sync("--allow-empty")) == (3 if None in last.values() else 0)
    found = check(site, engine, set(notes.read_text().splitlines()))
    assert {name: text for name, text in found.items() if last[name] is not None} == {
        name: text for name, text in last.items() if text is not None
    }


def decoded(path: Path) -> str | None:
    """A file's text; None where it ends inside a character."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def check(site: Site, engine: Engine, seen: set[str]) -> dict[str, str]:
    """Every cache is one of a text that its file has had: checksum, tokens and exact rows; the texts."""
    texts = {}
    with Store.open(site.store, read_only=True) as store:
        engine.rotations = None
        for head in store.documents():
            snapshot = store.snapshot(head, check=True)
            text = texts[head.doc_id] = snapshot.text
            assert hashlib.sha256(text.encode()).hexdigest() == head.text_sha256
            assert head.text_sha256 in seen, head
            if text:
                compare(engine, store, snapshot)
    return texts


def compare(engine, store, snapshot) -> None:
    from kvfix.pipeline.admission import recall

    engine.gate_report = None
    assert recall(engine, store)
    ids = engine.encode(snapshot.text).token_ids
    assert np.array_equal(snapshot.token_ids, ids)
    until = snapshot.record.exact_until
    if until:
        assert deviation(load_cache(engine, snapshot, 0), engine.prefill(ids), slice(0, until)) <= CACHE
