"""Whatever ends a commit, wherever it does: the reader sees the old version or the new one, whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from sqlalchemy import event

from kvfix.errors import StoreBusyError, StoreNotWritableError
from kvfix.store import Store, commits, files, garbage, lock, manifest, objects
from tests.store.helpers import build, edit, loaded

# each is one step of a commit, in the order of their first use
STEPS = {
    "lock taken": (lock.WriterLock, "_note"),
    "space checked": (files, "need_space"),
    "temporary file made": (files, "create"),
    "segment serialised": (objects, "_serialise"),
    "file synced": (files, "sync_file"),
    "segment hashed": (objects, "hash_file"),
    "file renamed": (os, "replace"),
    "directory synced": (files, "sync_directory"),
    "record written": (commits.Committer, "_change"),
    "transaction open": (manifest, "_make_room"),
    "row inserted": (manifest, "_insert"),
    "transaction done": (manifest.Manifest, "commit"),
    "old files removed": (commits.Committer, "_remove"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(monkeypatch, step: str, after: bool, nth: int, action=die) -> None:
    """Let `action` happen before or after the nth call of a step."""
    owner, name = STEPS[step]
    real, begun, done = getattr(owner, name), [], []

    def interrupted(*arguments, **keywords):
        begun.append(None)
        if len(begun) == nth and not after:
            action()
        result = real(*arguments, **keywords)
        done.append(None)
        if len(done) == nth and after:
            action()
        return result

    monkeypatch.setattr(owner, name, interrupted)


def commit_in_child(path: Path, monkeypatch, step: str, after: bool, nth: int, **kind) -> bool:
    """Whether the child was killed in the middle of an edit."""
    child = os.fork()
    if child == 0:
        try:
            interrupt(monkeypatch, step, after, nth)
            with Store.open(path) as store:
                edit(store, store.head("/corpus", "a.md"), **kind)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A store with one version whose edit adds a patch, and one whose edit folds and drops a version."""
    paths = {}
    for name, num_rows, num_edits in (("patch", 20, 0), ("fold", 20, 8)):
        paths[name] = tmp_path_factory.mktemp(name) / "store"
        with Store.open(paths[name], create=True) as store:
            record = build(store, num_rows=num_rows)
            for number in range(num_edits):
                record = edit(store, record, text=f"edit {number}", seed=10 + number)
    return paths


def check_whole(store: Store, old, old_keys: torch.Tensor, expect_new: bool | None = None) -> None:
    head = store.head("/corpus", "a.md")
    assert head.version in (old.version, old.version + 1)
    if expect_new is not None:
        assert (head.version > old.version) == expect_new
    keys = loaded(store.snapshot(head, check=True))[0]
    unchanged = [i for i in range(20) if i not in (3, 4)]
    assert torch.equal(keys[:, :, unchanged], old_keys[:, :, unchanged])
    assert torch.equal(keys, old_keys) == (head.version == old.version)
    assert store.verify() == []


@pytest.mark.parametrize("kind", ["patch", "fold"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_kill_at_every_step(stores, tmp_path, monkeypatch, step, after, kind):
    path = shutil.copytree(stores[kind], tmp_path / "store")
    with Store.open(path, read_only=True) as reader:
        old = reader.head("/corpus", "a.md")
        early = reader.snapshot(old)
        old_keys = loaded(early)[0].clone()
        assert commit_in_child(path, monkeypatch, step, after, nth=1)
        committed = step == "old files removed" or (step == "transaction done" and after)
        check_whole(reader, old, old_keys, expect_new=committed)
        assert torch.equal(loaded(early)[0], old_keys)
    with Store.open(path) as store:
        again = edit(store, store.head("/corpus", "a.md"), text="after", seed=5)
        assert store.snapshot(again, check=True).text == "after"
        store.gc(min_age_s=0)
        assert list(path.glob("tmp/*")) == []
        assert store.verify() == []


def test_each_file_is_durable_before_what_refers_to_it(store, monkeypatch):
    """Synced, renamed, its directory synced: segment, then record, and only then the transaction."""
    record, seen = build(store), []
    there = {path for path in store.path.glob("*/*") if path.is_dir()}  # names are hashes: one may fall into these
    for owner, name in ((files, "sync_file"), (os, "replace"), (files, "sync_directory"), (manifest, "_insert")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, real=real: (seen.append((name, *a)), real(*a))[1])
    edit(store, record)
    renames = [event for event in seen if event[0] == "replace"]
    assert [final.suffix for _, _, final in renames] == [".safetensors", ".json"]
    inserted = next(at for at, event in enumerate(seen) if event[0] == "_insert")
    for rename in renames:
        _, new, final = rename
        at = seen.index(rename)
        assert ("sync_file", new) in seen[:at]
        assert final.parent in there or ("sync_directory", final.parent.parent) in seen[:at]
        assert ("sync_directory", final.parent) in seen[at:inserted]


def test_a_new_directory_is_durable_before_a_file_gets_its_name_in_it(store, monkeypatch):
    seen = []
    for owner, name in ((os, "replace"), (files, "sync_directory")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, real=real: (seen.append((name, *a)), real(*a))[1])
    final = store.path / "records" / "new" / "a.json"
    files.write_bytes(store._layout, final, b"{}")
    assert [(name, arguments[-1]) for name, *arguments in seen] == [
        ("sync_directory", final.parent.parent),
        ("replace", final),
        ("sync_directory", final.parent),
    ]


def test_syncing_reaches_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    (tmp_path / "file").touch()
    files.sync_file(tmp_path / "file")
    files.sync_directory(tmp_path)
    assert synced == [str(tmp_path / "file"), str(tmp_path)]


def test_sqlite_is_told_to_be_durable(store):
    with store._manifest.database.writing() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 3
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"


@pytest.mark.parametrize("nth", [2, 3, 4])
@pytest.mark.parametrize("step", ["temporary file made", "file synced", "file renamed", "directory synced"])
def test_kill_at_later_files(stores, tmp_path, monkeypatch, step, nth):
    path = shutil.copytree(stores["patch"], tmp_path / "store")
    with Store.open(path) as store:
        old = store.head("/corpus", "a.md")
        old_keys = loaded(store.snapshot(old))[0].clone()
        commit_in_child(path, monkeypatch, step, False, nth)
        check_whole(store, old, old_keys)


def test_kill_between_the_last_statement_and_the_commit(stores, tmp_path):
    path = shutil.copytree(stores["fold"], tmp_path / "store")
    child = os.fork()
    if child == 0:
        try:
            with Store.open(path) as store:
                writes = store._manifest.database._engine
                event.listen(writes, "commit", lambda c: c.get_execution_options().get("kvfix_write") and die())
                edit(store, store.head("/corpus", "a.md"))
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    with Store.open(path) as store:
        assert store.head("/corpus", "a.md").version == 9
        assert store.verify() == []
        assert edit(store, store.head("/corpus", "a.md")).version == 10


def kill_in_transaction(path: Path) -> None:
    """Leave a journal behind whose pages have already reached the manifest."""
    child = os.fork()
    if child == 0:
        connection = sqlite3.connect(path / "manifest.sqlite", isolation_level=None)
        connection.execute("PRAGMA cache_size=1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE versions SET num_tokens = 99")
        connection.executemany("INSERT INTO meta VALUES (?, ?)", [(str(n), "x" * 500) for n in range(500)])
        die()
    os.waitpid(child, 0)
    assert (path / "manifest.sqlite-journal").stat().st_size > 0


@pytest.mark.parametrize("read_only", [True, False])
def test_a_transaction_killed_half_way_is_undone_by_the_next_reader(store, read_only):
    record = build(store)
    kill_in_transaction(store.path)
    with Store.open(store.path, read_only=read_only) as again:
        assert again.documents() == [record]
        assert again.verify() == []


def test_a_reader_that_was_there_before_does_not_mind_either(store):
    record = build(store)
    with Store.open(store.path, read_only=True) as reader:
        assert reader.documents() == [record]
        kill_in_transaction(store.path)
        assert reader.documents() == [record]
        assert loaded(reader.snapshot(record, check=True))[0].shape[2] == 20


FAILURES = {
    "no space": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "quota": OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    "read-only": OSError(errno.EROFS, os.strerror(errno.EROFS)),
    "denied": PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "broken disk": OSError(errno.EIO, os.strerror(errno.EIO)),
}
SYSTEM_STEPS = ["temporary file made", "segment serialised", "file synced", "file renamed", "directory synced"]


def unreferenced(store: Store) -> list[Path]:
    return garbage.unreferenced(store._layout, store._manifest)


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", SYSTEM_STEPS)
def test_a_disk_that_refuses_leaves_the_old_entry_and_no_temporary_file(store, monkeypatch, step, nth, failure):
    if step == "segment serialised" and nth > 1:
        pytest.skip("a commit has one segment")
    record = build(store)
    with monkeypatch.context() as patch:
        interrupt(patch, step, False, nth, raising(FAILURES[failure]))
        with pytest.raises(StoreNotWritableError, match=str(store.path)) as caught:
            edit(store, record)
    assert caught.value.exit_code == 9
    assert os.strerror(FAILURES[failure].errno) in caught.value.message
    assert list(store.path.glob("tmp/*")) == []
    assert unreferenced(store) == []
    assert store.head("/corpus", "a.md") == record
    assert store.verify() == []
    assert edit(store, record).version == 2


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("step", [*SYSTEM_STEPS, "segment hashed", "record written", "row inserted"])
def test_an_interruption_leaves_the_old_entry_no_temporary_file_and_no_lock(store, monkeypatch, step, interruption):
    record = build(store)
    with monkeypatch.context() as patch:
        interrupt(patch, step, False, 1, raising(interruption()))
        with pytest.raises(interruption):
            edit(store, record)
    assert list(store.path.glob("tmp/*")) == []
    assert unreferenced(store) == []
    assert store.head("/corpus", "a.md") == record
    with Store.open(store.path) as other:
        assert edit(other, record).version == 2


@pytest.mark.parametrize("after", [False, True])
def test_an_interruption_after_the_transaction_takes_nothing_back(store, monkeypatch, after):
    record = build(store)
    with monkeypatch.context() as patch:
        interrupt(patch, "transaction done", after, 1, raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            edit(store, record)
    head = store.head("/corpus", "a.md")
    assert head.version == (2 if after else 1)
    assert store.snapshot(head, check=True).text == ("one 2 three" if after else "one two three")
    assert unreferenced(store) == []
    assert store.verify() == []


def test_a_commit_that_fails_leaves_the_files_that_were_there_before_it(store, monkeypatch):
    """The segment of a twin, which has the same content and so the same name."""
    twin = build(store, doc_id="b.md")
    with monkeypatch.context() as patch:
        interrupt(patch, "row inserted", False, 1, raising(FAILURES["broken disk"]))
        with pytest.raises(OSError, match="Input/output"):
            build(store)
    assert store.snapshot(twin, check=True).record == twin
    assert unreferenced(store) == []


def test_safetensors_own_words_for_a_full_disk_are_understood(store, monkeypatch):
    def save_file(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    record = build(store)
    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    with pytest.raises(StoreNotWritableError, match="No space left"):
        edit(store, record)
    assert list(store.path.glob("tmp/*")) == []


def test_too_little_space_is_told_before_anything_is_written(store, monkeypatch):
    record = build(store)
    usage = shutil.disk_usage(store.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(objects, "_serialise", lambda *_: pytest.fail("something was written"))
    with pytest.raises(StoreNotWritableError, match="1000 are free"):
        edit(store, record)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("database or disk is full", StoreNotWritableError),
        ("attempt to write a readonly database", StoreNotWritableError),
        ("unable to open database file", StoreNotWritableError),
        ("disk I/O error", StoreNotWritableError),
        ("database is locked", StoreBusyError),
    ],
)
def test_what_sqlite_says_in_mid_commit(store, monkeypatch, reason, error):
    def fail(*_):
        raise sqlite3.OperationalError(reason)

    record = build(store)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_insert", fail)
        with pytest.raises(error):
            edit(store, record)
    assert list(store.path.glob("tmp/*")) == []
    assert unreferenced(store) == []
    assert store.head("/corpus", "a.md") == record
    assert edit(store, record).version == 2


def test_a_full_disk_for_real(tmp_path, request, monkeypatch):
    """Needs the right to mount a small tmpfs."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=700k tmpfs {folder} 2>/dev/null"):
        pytest.skip("no right to mount")
    request.addfinalizer(lambda: os.system(f"umount -l {folder}"))
    with Store.open(folder / "s", create=True) as store:
        first = build(store)
        with monkeypatch.context() as patch:
            patch.setattr(files, "SPACE_MARGIN_BYTES", -(1 << 30))
            with pytest.raises(StoreNotWritableError, match="No space left"):
                build(store, num_rows=4000, text="big")
        assert list(store.path.glob("tmp/*")) == []
        with pytest.raises(StoreNotWritableError, match="are free"):
            build(store, num_rows=4000, text="big")
        assert store.head("/corpus", "a.md") == first
        assert store.verify() == []
        assert edit(store, first).version == 2
