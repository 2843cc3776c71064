"""Who may open, read and write a store, and what the others are told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfix.errors import (
    DocumentError,
    StoreBusyError,
    StoreDamagedError,
    StoreMissingError,
    StoreNotWritableError,
    UsageError,
)
from kvfix.store import Store
from tests.store.helpers import KEY, build, cache_of, document, edit, exact


@contextmanager
def umask(value: int):
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_modes_follow_the_umask(tmp_path, mask):
    with umask(mask), Store.open(tmp_path / "store", create=True) as store:
        edit(store, build(store))
        store.save_gate(KEY.fingerprint, "sdpa", {})
        with store.writing("test"):
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [store.path, *store.path.rglob("*")]}
    assert len(modes) > 12
    for path, mode in modes.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, path


def as_other_user(path: Path, look) -> str:
    """What `look(path)` returns or raises in a process that may not write the store."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    for parent in [path, *path.parents]:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o055)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            answer = look(path)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, str(answer).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.parametrize("read_only", [True, False])
def test_another_user_reads_a_store_that_only_its_owner_may_write(store, read_only):
    edit(store, build(store))

    def look(path):
        with Store.open(path, read_only=read_only) as other:
            head = other.documents()[0]
            return other.snapshot(head, check=True).text, other.verify(), other.previous(head).version

    assert as_other_user(store.path, look) == "('one 2 three', [], 1)"


@pytest.mark.parametrize("action", ["commit", "gc", "remove", "gate"])
def test_another_user_is_told_that_the_store_is_not_writable(store, action):
    build(store)

    def look(path):
        with Store.open(path) as other:
            if action == "commit":
                build(other, text="mine")
            elif action == "gc":
                other.gc()
            elif action == "remove":
                other.remove("/corpus", "a.md")
            else:
                other.save_gate(KEY.fingerprint, "x", {})

    assert as_other_user(store.path, look).startswith("StoreNotWritableError: Cannot write")


def test_a_read_only_store_refuses_every_change(store):
    record = build(store)
    store.save_gate(KEY.fingerprint, "sdpa", {})
    before = sorted(path.stat().st_mtime_ns for path in store.path.rglob("*"))
    with Store.open(store.path, read_only=True) as other:
        for change in (
            lambda: edit(other, record),
            lambda: build(other),
            lambda: other.remove("/corpus", "a.md"),
            lambda: other.relink(record, document("one two three", "b.md")),
            lambda: other.save_model(KEY),
            lambda: other.save_gate(KEY.fingerprint, "sdpa", {}),
            lambda: other.gc(),
            lambda: other.writing("x").__enter__(),
            lambda: other.try_write(document("x"), cache_of(3)),
        ):
            with pytest.raises(StoreNotWritableError, match="reading only"):
                change()
        assert other.verify() == []
    assert sorted(path.stat().st_mtime_ns for path in store.path.rglob("*")) == before


def test_a_read_only_store_has_a_read_only_manifest(store):
    def insert(database):
        with database.reading() as connection:
            connection.exec_driver_sql("INSERT INTO meta VALUES ('a', 'b')")

    insert(store._manifest.database)
    with Store.open(store.path, read_only=True) as other, pytest.raises(StoreDamagedError, match="may write it"):
        insert(other._manifest.database)


# the writer lock


def hold(path: Path, ready, verb: str) -> None:
    with Store.open(path) as store, store.writing(verb):
        ready.set()
        time.sleep(60)


@contextmanager
def holder(store: Store, verb: str):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(store.path, ready, verb))
    process.start()
    try:
        assert ready.wait(20)
        yield process
    finally:
        process.kill()
        process.join()


def test_the_holder_is_named_and_its_death_frees_the_lock(store):
    record = build(store)
    with holder(store, "sync") as process:
        for attempt in (lambda: store.writing("edit").__enter__(), lambda: store.gc()):
            store._busy_s = 0.1
            with pytest.raises(StoreBusyError, match=f"kvfix sync, process {process.pid} on") as caught:
                attempt()
        assert caught.value.exit_code == 4
        assert store.head("/corpus", "a.md") == record
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with store.writing("edit"):
            assert f"kvfix edit, process {os.getpid()}" in store._lock.holder()
            edit(store, record)
    assert not (store.path / "lock.holder").exists()


@pytest.mark.parametrize("note", [None, b"", b"{", b"[]", b"\xff"])
def test_an_unreadable_note_of_the_holder_is_no_obstacle(store, note):
    with store.writing("sync"):
        if note is None:
            (store.path / "lock.holder").unlink()
        else:
            (store.path / "lock.holder").write_bytes(note)
        with Store.open(store.path) as other, pytest.raises(StoreBusyError), other.writing("edit"):
            pass
    with store.writing("sync"):
        pass


def test_a_thread_may_commit_while_another_holds_the_lock(store):
    from concurrent.futures import ThreadPoolExecutor

    with store.writing("build"), ThreadPoolExecutor(1) as pool:
        records = [pool.submit(build, store, doc_id=f"{n}.md").result() for n in range(3)]
        with Store.open(store.path) as other, pytest.raises(StoreBusyError), other.writing("edit"):
            pass
    assert store.documents() == records
    with Store.open(store.path) as other, other.writing("edit"):
        pass


def test_a_thread_that_takes_the_lock_while_another_gives_it_back_leaves_its_name(store, monkeypatch):
    real, inside, may_leave = Path.unlink, threading.Event(), threading.Event()

    def other():
        with store.writing("refresh", 10):
            inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=other)

    def unlink(path, **more):
        if path.name == "lock.holder" and not thread.ident:
            thread.start()
            inside.wait(0.2)
        real(path, **more)

    with store.writing("sync"):
        monkeypatch.setattr(Path, "unlink", unlink)
    assert inside.wait(10)
    assert "kvfix refresh" in store._lock.holder()
    may_leave.set()
    thread.join()
    assert not (store.path / "lock.holder").exists()


def test_a_locked_manifest_is_busy_and_readers_do_not_mind(tmp_path):
    with Store.open(tmp_path / "s", create=True, busy_s=0.2) as store:
        record = build(store)
        connection = sqlite3.connect(store.path / "manifest.sqlite", isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError, match="locked"):
            edit(store, record)
        assert store.documents() == [record]
        connection.execute("COMMIT")
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreBusyError, match="locked"):
            store.documents()
        connection.close()
        assert edit(store, record).version == 2


def test_a_transaction_that_writes_keeps_others_out_from_its_first_moment(store):
    connection = sqlite3.connect(store.path / "manifest.sqlite", isolation_level=None, timeout=0)
    with store._manifest.database.writing(), pytest.raises(sqlite3.OperationalError, match="locked"):
        connection.execute("BEGIN IMMEDIATE")
    connection.close()


def race(path: Path, number: int, answers) -> None:
    try:
        with Store.open(path) as store:
            record = store.version("/corpus", "a.md", 1)
            answers.put((number, edit(store, record, text=f"{number}", seed=number).version))
    except StoreBusyError:
        answers.put((number, None))


def test_of_several_processes_that_edit_one_version_one_wins(store):
    build(store)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    racers = [context.Process(target=race, args=(store.path, number, answers)) for number in range(4)]
    for process in racers:
        process.start()
    results = dict(answers.get(timeout=60) for _ in racers)
    for process in racers:
        process.join()
    winners = [number for number, version in results.items() if version]
    assert len(winners) == 1
    head = store.head("/corpus", "a.md")
    assert (head.version, store.snapshot(head, check=True).text) == (2, str(winners[0]))
    assert store.verify() == []


# making and finding a store


@pytest.mark.parametrize("content", [None, [], [".gitkeep"], [".gitignore", "lost+found/"], ["objects/", "tmp/"]])
def test_a_store_is_made_where_nothing_is_in_the_way(tmp_path, content):
    path = tmp_path / "deep" / "store"
    if content is not None:
        path.mkdir(parents=True)
    for name in content or []:
        (path / name).mkdir() if name.endswith("/") else (path / name).touch()
    with pytest.raises(StoreMissingError, match="kvfix build") as caught:
        Store.open(path)
    assert caught.value.exit_code == 2
    with Store.open(path, create=True) as store:
        record = build(store)
    with Store.open(path, create=True) as store:
        assert store.documents() == [record]


def test_a_creation_that_was_interrupted_is_finished_by_the_next(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvfix.store.manifest.Manifest.create", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            Store.open(tmp_path / "s", create=True)
    with pytest.raises(StoreMissingError):
        Store.open(tmp_path / "s", read_only=True)
    with Store.open(tmp_path / "s", create=True) as store:
        build(store)


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        Store.open(tmp_path, create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="not a directory"):
        Store.open(tmp_path / "thesis.tex", create=True)
    with pytest.raises(StoreMissingError):
        Store.open(tmp_path / "thesis.tex")


def test_a_place_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    def mkdir(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(StoreNotWritableError, match="Permission denied"):
        Store.open(tmp_path / "s", create=True)


def test_a_store_of_a_newer_format_is_refused_and_left_alone(store):
    with sqlite3.connect(store.path / "manifest.sqlite") as connection:
        connection.execute("UPDATE meta SET value = '2' WHERE key = 'format'")
    with pytest.raises(StoreDamagedError, match="make no sense"):
        Store.open(store.path)
    with sqlite3.connect(store.path / "manifest.sqlite") as connection:
        connection.execute("DELETE FROM meta WHERE key = 'seal'")
    with pytest.raises(UsageError, match="newer kvfix"):
        Store.open(store.path)
    with pytest.raises(UsageError, match="newer kvfix"):
        Store.rebuild(store.path)


def test_how_many_versions_are_kept_is_a_setting_of_the_store(store):
    with sqlite3.connect(store.path / "manifest.sqlite") as connection:
        connection.execute("UPDATE meta SET value = '3' WHERE key = 'keep'")
    with Store.open(store.path) as again:
        record = build(again)
        for number in range(5):
            record = edit(again, record, text=f"{number}")
        kept = [n for n in range(1, 8) if again.version("/corpus", "a.md", n)]
    assert kept == [3, 4, 5, 6]


def test_a_file_name_that_is_no_text_is_one_documents_problem(store):
    name = os.fsdecode(b"caf\xe9.md")
    with pytest.raises(DocumentError, match="UTF-8"):
        store.commit_base(document("x", name), KEY, cache_of(3), exact(3), {}, None)
    assert store.gc(min_age_s=0).num_files == 0


def test_looking_at_a_store_imports_no_torch(store):
    build(store)
    code = (
        "import sys; from kvfix.store import Store\n"
        f"with Store.open({str(store.path)!r}, read_only=True) as s: s.documents(), s.corpora(), s.gates()\n"
        "with Store.open(s.path) as s: print(s.documents()[0].doc_id, s.gc().num_files)\n"
        "print([m for m in ('torch', 'safetensors', 'transformers', 'numpy') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.splitlines() == ["a.md 0", "[]"]
