"""A corpus that people go on editing, a store of it, and verbs run on both in processes that may be ended."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvfix import align
from kvfix.cli.app import main
from kvfix.store import Snapshot, Store, VersionRecord

LONG = bool(os.environ.get("KVFIX_LONG"))
UNCAUGHT = 99
SENTENCES = 6


class Author:
    """Changes a corpus the way people do. Unless something is restored, no text is written twice."""

    def __init__(self, corpus: Path, seed: int, num_pages: int = 4) -> None:
        self.corpus, self.chance, self.serial = corpus, random.Random(seed), 0
        self.removed: dict[str, str] = {}
        corpus.mkdir(parents=True)
        for _ in range(num_pages):
            self.add()

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.corpus.glob("*.md"))

    def sentence(self) -> str:
        self.serial += 1
        what = self.chance.choice(["ferry leaves the pier", "clerk signs the slip", "crane lifts the crate"])
        return f"The {what} after {self.serial} bells."

    def add(self) -> None:
        self._save(f"page{self.serial}.md", [self.sentence() for _ in range(SENTENCES)])

    def edit(self) -> None:
        """Replace, insert or delete a sentence; what is left holds a new one in any case."""
        name = self.chance.choice(self.names)
        sentences = (self.corpus / name).read_text().splitlines()
        at = self.chance.randrange(len(sentences))
        length = {"replace": 1, "insert": 0, "shorten": 2}[self.chance.choice(["replace", "insert", "shorten"])]
        if len(sentences) > 2 * SENTENCES:
            length = SENTENCES
        sentences[at : at + length] = [self.sentence()]
        self._save(name, sentences)

    def rename(self) -> None:
        name = self.chance.choice(self.names)
        (self.corpus / name).rename(self.corpus / f"renamed{self.serial}.md")
        self.serial += 1

    def remove(self) -> None:
        if len(self.names) > 2:
            path = self.corpus / self.chance.choice(self.names)
            self.removed[path.name] = path.read_text()
            path.unlink()

    def restore(self) -> None:
        """Bring a file back as it was when it was removed."""
        for name in self.chance.sample(sorted(self.removed), min(1, len(self.removed))):
            (self.corpus / name).write_text(self.removed.pop(name))

    def _save(self, name: str, sentences: list[str]) -> None:
        (self.corpus / name).write_text("".join(f"{sentence}\n" for sentence in sentences))


class Site:
    """A corpus and a store that take the blows, and a reference store that takes none."""

    def __init__(self, root: Path, model: str, seed: int = 0) -> None:
        self.root, self.model = root, model
        self.store, self.reference, self.known = root / "store", root / "reference", root / "known"
        self.known.mkdir(parents=True)
        self.author = Author(root / "docs", seed)
        self.corpus = self.author.corpus

    def sync(self, *options: object, store: Path | None = None) -> list[str]:
        """The arguments of a pass."""
        given = [self.corpus, "--store", store or self.store, "--model", self.model, "--lock-timeout", 0, "--prune"]
        return ["sync", *map(str, (*given, "--strategy", "repair", "--k", 8, *options))]

    def learn(self) -> dict[str, VersionRecord]:
        """Bring the reference up to the corpus, undisturbed, and remember every row of it; its heads."""
        assert in_process(self.sync(store=self.reference)) == 0
        with Store.open(self.reference, read_only=True) as store:
            heads = {record.doc_id: record for record in store.documents()}
            for record in heads.values():
                path = self.known / f"{record.text_sha256}.npz"
                if not path.exists():
                    rows = rows_of(store.snapshot(record, check=True))
                    np.savez(path.with_suffix(".tmp.npz"), **rows)
                    path.with_suffix(".tmp.npz").rename(path)
        return heads

    def fault(self, snapshot: Snapshot) -> str | None:
        """What is wrong with a version that was read; None where it is the one whole version of its text."""
        path = self.known / f"{snapshot.record.text_sha256}.npz"
        if not path.exists():
            return f"{snapshot.record.doc_id} has a text that no pass has seen"
        found, known = rows_of(snapshot), np.load(path)
        for name, expected in known.items():
            same = found[name].shape == expected.shape and np.allclose(found[name], expected, atol=1e-5)
            if not same:
                return f"{name} of {snapshot.record.doc_id} version {snapshot.record.version} are not its text's"
        return None


def rows_of(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """All that a version says of its rows, in order; keys as they were computed."""
    if not snapshot.segments:
        return {"token_ids": snapshot.token_ids}
    cache = align.folded(snapshot.rows, snapshot.segments, snapshot.token_ids)
    return {
        "keys": cache.keys.numpy(),
        "values": cache.values.numpy(),
        "token_ids": cache.token_ids,
        "origin": cache.origin,
    }


def in_process(arguments: list[str]) -> int:
    """Run a verb here, its output dropped; its exit code."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(arguments)


def forked(work: Callable[[], int], log: Path) -> int:
    """The id of a child that does `work`, ends with what that returns, and writes to `log`.

    A fork, because a new interpreter takes seconds to import what a pass needs.
    """
    child = os.fork()
    if child:
        return child
    code = UNCAUGHT
    try:
        file = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(file, "w")
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(child: int, after_s: float | None = None, number: int = signal.SIGKILL) -> int:
    """How a child ended: its exit code, or minus the signal, which it is sent after some time."""
    if after_s is not None:
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
