"""A disk that fails under a verb: the old entry stands, the exit code is 9, nothing temporary stays, the next works.

The short mode raises errors where kvfix calls the system. KVFIX_LONG=1 goes below: a small library is preloaded that
lets every single system call of a verb fail in turn, those of SQLite and safetensors included, or kills the verb there.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvfix.cli.app import main
from kvfix.store import Store
from tests.operations.conftest import MEMORY
from tests.operations.site import LONG, Site, ended, forked, in_process, rows_of
from tests.store.test_crash import FAILURES, SYSTEM_STEPS, interrupt, raising

SOURCE = Path(__file__).with_name("faults.c")
READ, WRITE, REMOVE = 1, 2, 4  # as in that file
NOWHERE = 1 << 30

State = dict[str, dict[str, np.ndarray]]


class Verb(NamedTuple):
    """Arguments besides the common ones, and whether the verb needs the model."""

    arguments: tuple[str, ...]
    modelled: bool = True


VERBS = {
    "build": Verb(("build", "DOCS")),
    "edit": Verb(("edit", "CHANGED", "--strategy", "repair", "--k", "8")),
    "sync": Verb(("sync", "DOCS", "--strategy", "repair", "--k", "8", "--prune")),
    "refresh": Verb(("refresh",)),
    "gc": Verb(("gc", "--min-age", "0s", "--keep", "0"), False),
    "compact": Verb(("compact",), False),
    "fsck": Verb(("fsck", "--rebuild"), False),
}


class Assault:
    """A store that is put back before every blow, and what each verb makes of it in peace."""

    def __init__(self, root: Path, model: str) -> None:
        self.site = site = Site(root, model)
        self.log, self.peace = root / "verb.log", root / "peace"
        self.ends: dict[str, State] = {}
        for _ in range(6):
            assert in_process(site.sync()) == 0
            site.author.edit()
        assert in_process(site.sync()) == 0
        site.author.add(), site.author.rename(), site.author.remove(), site.author.edit()
        self._leave_behind()
        site.store.rename(self.peace)
        self.begin = self.state(self.peace)
        with Store.open(self.peace, read_only=True) as store:
            heads = {head.doc_id: head for head in store.documents()}
        texts = {name: (site.corpus / name).read_bytes() for name in site.author.names if name in heads}
        self.changed = next(n for n, text in texts.items() if rows_differ(self.begin[n]["text"], text))

    def _leave_behind(self) -> None:
        """What a killed commit leaves: a segment and a temporary folder."""
        name = hashlib.sha256(b"left").hexdigest()
        left = self.site.store / "objects" / name[:2] / f"{name}.safetensors"
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(b"left")
        (self.site.store / "tmp" / "1-dead").mkdir()

    def arguments(self, verb: str) -> list[str]:
        site, (given, modelled) = self.site, VERBS[verb]
        places = {"DOCS": str(site.corpus), "CHANGED": str(site.corpus / self.changed)}
        common = ["--store", str(site.store), "--json", *(["--model", site.model] if modelled else [])]
        return [*(places.get(part, part) for part in given), *common]

    def put_back(self) -> None:
        shutil.rmtree(self.site.store, ignore_errors=True)
        shutil.copytree(self.peace, self.site.store)

    def end(self, verb: str) -> State:
        """The state after the verb, undisturbed."""
        if verb not in self.ends:
            self.put_back()
            assert in_process(self.arguments(verb)) == 0
            end = self.ends[verb] = self.state(self.site.store)
            changes = any(not same(rows, self.begin.get(name, {})) for name, rows in end.items())
            assert changes == (verb in ("build", "edit", "sync", "refresh")), "this verb had nothing to do"
        return self.ends[verb]

    def strike(self, verb: str, blow: Callable[[], object]) -> int:
        """Run a verb in a child that has called `blow` before; how it ended."""
        self.put_back()
        return ended(forked(lambda: (blow(), main(self.arguments(verb)))[1], self.log))

    def judge(self, verb: str, code: int, codes: set[int], tidy: bool) -> None:
        """What is there after a verb that ended so."""
        end, said = self.end(verb), self.log.read_text()
        assert code in codes, said
        if code > 0:
            assert json.loads(said.splitlines()[-1])["error"]["exit_code"] == code
        found = self.state(self.site.store)
        assert self.begin.keys() & end.keys() <= found.keys()
        for name, rows in found.items():
            assert any(name in state and same(rows, state[name]) for state in (self.begin, end)), name
        if code == 0:
            assert found.keys() == end.keys()
            assert all(same(rows, end[name]) for name, rows in found.items())
        if tidy:
            assert {path.name for path in self.site.store.glob("tmp/*")} <= {"1-dead"}
            assert not (self.site.store / "lock.holder").exists()

    def go_on(self, verb: str) -> None:
        """The verb works the next time, and finishes what was begun."""
        assert in_process([*self.arguments(verb), "--lock-timeout", "0"]) == 0
        end, again = self.end(verb), self.state(self.site.store)
        assert again.keys() == end.keys()
        assert all(same(rows, end[name]) for name, rows in again.items())
        with Store.open(self.site.store, read_only=True) as store:
            assert store.verify() == []

    def state(self, path: Path) -> State:
        """Text and rows of every document."""
        with Store.open(path, read_only=True) as store:
            snapshots = [store.snapshot(head, check=True) for head in store.documents()]
            return {
                snapshot.record.doc_id: {"text": as_array(snapshot.text.encode()), **rows_of(snapshot)}
                for snapshot in snapshots
            }


def as_array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def rows_differ(text: np.ndarray, content: bytes) -> bool:
    return not np.array_equal(text, as_array(content))


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and np.allclose(one[name], other[name], atol=1e-5) for name in one
    )


@pytest.fixture(scope="module")
def assault(tiny: str) -> Iterator[Assault]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    root = Path(tempfile.mkdtemp(prefix="kvfix-", dir=MEMORY if MEMORY.is_dir() else None)).resolve()
    yield Assault(root, tiny)
    shutil.rmtree(root)


@pytest.mark.parametrize("verb", VERBS)
def test_a_refusal_of_the_system(assault, verb):
    """The error may come where it is of no consequence: then the verb is done."""
    chance = random.Random(verb)
    for step in chance.sample([s for s in SYSTEM_STEPS if s != "segment serialised"], 1):
        failure = FAILURES[chance.choice(sorted(FAILURES))]
        nth = chance.choice([1, 2])
        code = assault.strike(
            verb, lambda step=step, nth=nth, f=failure: interrupt(pytest.MonkeyPatch(), step, False, nth, raising(f))
        )
        assault.judge(verb, code, {0, 9}, tidy=True)
        assault.go_on(verb)


# below Python


@pytest.fixture(scope="session")
def shim() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "kvfix_faults_arm"):
        pytest.skip("runs under test_every_system_call, where faults.c is preloaded")
    library.kvfix_faults_what.restype = ctypes.c_char_p
    library.kvfix_faults_calls.restype = ctypes.c_long
    library.kvfix_faults_arm.argtypes = [ctypes.c_char_p, *[ctypes.c_long], *[ctypes.c_int] * 3]
    return library


def num_calls(assault: Assault, shim: ctypes.CDLL, verb: str, kinds: int) -> int:
    """How many system calls of these kinds a verb makes below the store."""

    def counted() -> int:
        shim.kvfix_faults_arm(os.fsencode(assault.site.store), NOWHERE, kinds, errno.EIO, 0)
        code = main(assault.arguments(verb))
        (assault.site.root / "calls").write_text(str(shim.kvfix_faults_calls()))
        return code

    assault.put_back()
    assert ended(forked(counted, assault.log)) == 0, assault.log.read_text()
    return int((assault.site.root / "calls").read_text())


class Blows(NamedTuple):
    """Which calls fail, with which errors in turn, whether all later ones do too, and what may come of it."""

    kinds: int
    errors: tuple[int, ...]
    codes: set[int]
    lasting: bool = False
    tidy: bool = True  # nothing temporary may stay
    most: int = 40  # trials of a verb, evenly spread over its calls


CAMPAIGNS = {
    "write": Blows(WRITE, (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES), {0, 9}, most=NOWHERE),
    "full": Blows(WRITE, (errno.ENOSPC,), {0, 9}, lasting=True),
    "read-only": Blows(WRITE | REMOVE, (errno.EROFS,), {0, 9}, lasting=True, tidy=False),
    "remove": Blows(REMOVE, (errno.EIO, errno.EACCES), {0, 9}, tidy=False),
    "read": Blows(READ, (errno.EIO, errno.EACCES), {0, 3, 6, 9}),
    "kill": Blows(WRITE | REMOVE, (0,), {-signal.SIGKILL}, tidy=False),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_each_call(assault, shim, campaign, verb):
    blows, below = CAMPAIGNS[campaign], os.fsencode(assault.site.store)
    total = num_calls(assault, shim, verb, blows.kinds)
    counts, wrong = Counter(), []
    for nth in range(1, total + 1, -(-total // blows.most)):
        error = blows.errors[nth % len(blows.errors)]
        arm = partial(shim.kvfix_faults_arm, below, nth, blows.kinds, error, blows.lasting)
        code = assault.strike(verb, arm)
        counts[code] += 1
        try:
            assault.judge(verb, code, blows.codes, blows.tidy)
            if sum(counts.values()) % 3 == 1:
                assault.go_on(verb)
        except Exception as problem:
            wrong.append((nth, errno.errorcode.get(error), str(problem)[:2000]))
    print(f"\n{campaign} {verb}: {sum(counts.values())} of {total} calls, ended with {dict(counts)}")
    assert wrong == []


@pytest.mark.skipif(not LONG, reason="half an hour: KVFIX_LONG=1 runs it")
def test_every_system_call(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-s", f"{__file__}::test_each_call"]
    done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(library)}, check=False)
    assert done.returncode == 0
