"""A manifest made anew from the records holds what the lost one held."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfix.errors import StoreBusyError, StoreDamagedError, StoreMissingError, UsageError
from kvfix.pipeline.status import statuses
from kvfix.store import Loss, Store, commits, schema
from tests.store.conftest import MEMORY
from tests.store.helpers import KEY, build, document, edit, loaded
from tests.store.test_crash import commit_in_child

STEPS = ("build", "edit", "edit", "edit", "compact", "remove", "relink", "copy", "restore", "gc", "model")


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 4
    file.write_bytes(content)


def segment_file(store: Store, record, number: int) -> Path:
    name = store.detail(record).segments[number].name
    return store.path / "objects" / name[:2] / f"{name}.safetensors"


def record_file(store: Store, record) -> Path:
    return store.path / "records" / record.record_id[:2] / f"{record.record_id}.json"


def state(path: Path) -> list:
    """Everything that a reader can learn from a store."""
    with Store.open(path, read_only=True) as store:
        versions = store._manifest.versions()
        found = [store.documents(), versions, store._manifest.references(), store.gates()]
        found += [store._manifest.fingerprints(), [status.to_json() for status in statuses(store.documents())]]
        for record in versions:
            if record.kind != "tombstone":
                snapshot = store.snapshot(record, check=True)
                found += [store.detail(record), snapshot.text, snapshot.token_ids.tolist()]
                found += [[rows.numpy().tobytes() for rows in loaded(snapshot)] if record.num_tokens else []]
        return found


def step(store: Store, action: str, number: int, doc_id: str) -> None:
    """One change of a random history, if the document is in a state that allows it."""
    head = store.head("/corpus", doc_id)
    if action == "build":
        build(store, text=f"text {number}", num_rows=1 + number % 9, seed=number, doc_id=doc_id)
    elif action == "gc":
        store.gc(min_age_s=0)
    elif action == "model":
        other = replace(KEY, name=f"model {number}", weights=str(number))
        store.save_model(other)
        store.save_gate(other.fingerprint, f"backend/{number}", {"n": number})
    elif head is None:
        return
    elif action == "edit":
        edit(store, head, text=f"text {number}", positions=(number % head.num_tokens,), seed=number)
    elif action == "compact":
        store.compact(head)
    elif action == "remove":
        store.remove("/corpus", doc_id)
    elif action == "restore" and store.previous(head):
        store.restore(head)
    elif action in ("relink", "copy") and store.head("/corpus", f"{number}.md") is None:
        target = document(store.snapshot(head).text, f"{number}.md")
        store.relink(head, target, keep_old=action == "copy")


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    history=st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from("abc")), min_size=5, max_size=25),
    keep=st.sampled_from([0, 1, 3]),
    damage=st.sampled_from(["missing", "empty", "noise", "lost rows", "none"]),
)
def test_any_history_is_restored_whole(history, keep, damage):
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as folder:
        path = Path(folder, "s")
        with Store.open(path, create=True, keep=keep) as store:
            build(store, doc_id="a.md")
            for number, (action, doc_id) in enumerate(history):
                step(store, action, number, f"{doc_id}.md")
        before = state(path)
        ruin(path / "manifest.sqlite", damage)
        rebuilt = Store.rebuild(path)
        assert (rebuilt.damages, rebuilt.losses) == ([], [])
        assert rebuilt.num_documents == len(before[0])
        assert state(path) == before
        with Store.open(path, keep=keep) as store:
            assert store.verify() == []
            assert store.gc(min_age_s=0).num_files == 0
            build(store, doc_id="a.md", seed=99)


def ruin(manifest: Path, damage: str) -> None:
    if damage == "missing":
        manifest.unlink()
    elif damage == "empty":
        manifest.write_bytes(b"")
    elif damage == "noise":
        manifest.write_bytes(random.Random(1).randbytes(20_000))
    elif damage == "lost rows":
        with sqlite3.connect(manifest) as connection:
            for table in ("documents", "versions", "segments", "models", "gates"):
                connection.execute(f"DELETE FROM {table} WHERE rowid % 2")
            connection.execute("DELETE FROM meta")


@pytest.fixture
def chain(store) -> Store:
    """a.md with two versions, the second a patch; b.md with one."""
    edit(store, build(store))
    build(store, doc_id="b.md", seed=5)
    return store


def test_the_old_manifest_and_its_journal_are_kept_beside(chain):
    manifest = chain.path / "manifest.sqlite"
    old = manifest.read_bytes()
    mode = manifest.stat().st_mode
    rebuilt = Store.rebuild(chain.path)
    assert (chain.path / rebuilt.set_aside).read_bytes() == old
    assert manifest.stat().st_mode == mode
    assert list((chain.path / "tmp").iterdir()) == []
    # what is left of a killed writer would be played into the new manifest
    manifest.unlink()
    Path(f"{manifest}-journal").write_bytes(b"pages of another file")
    assert Store.rebuild(chain.path).set_aside is None
    assert not Path(f"{manifest}-journal").exists()
    assert [path.read_bytes() for path in chain.path.glob("*.damaged-*-journal")] == [b"pages of another file"]
    assert chain.verify() == []


def test_a_store_beside_an_old_manifest_is_no_foreign_directory(tmp_path):
    path = tmp_path / "s"
    Store.open(path, create=True).close()
    Store.rebuild(path)
    (path / "manifest.sqlite").unlink()
    with Store.open(path, create=True) as store:
        assert store.documents() == []


def test_a_damaged_head_gives_way_to_the_newest_whole_version(chain):
    head = chain.head("/corpus", "a.md")
    file = segment_file(chain, head, 1)
    flip(file, file.stat().st_size - 20)
    rebuilt = Store.rebuild(chain.path)
    assert rebuilt.losses == [Loss("/corpus", "a.md", 2, 1)]
    assert [(damage.doc, damage.version) for damage in rebuilt.damages] == [("a.md", 2)]
    assert chain.head("/corpus", "a.md").version == 1
    chain.snapshot(chain.head("/corpus", "a.md"), check=True)
    assert {item.doc for item in chain.verify()} == {None}
    chain.gc(min_age_s=0)
    assert chain.verify() == []


@pytest.mark.parametrize("damage", ["flipped", "noise", "missing segment"])
def test_a_document_whose_only_version_is_damaged_is_named(chain, damage):
    record = chain.head("/corpus", "b.md")
    if damage == "missing segment":
        segment_file(chain, record, 0).unlink()
    elif damage == "noise":
        record_file(chain, record).write_bytes(b"\xff" * 500)
    else:
        content = record_file(chain, record).read_bytes()
        record_file(chain, record).write_bytes(content.replace(b'"num_prefix":1', b'"num_prefix":3'))
    (chain.path / "manifest.sqlite").unlink()
    rebuilt = Store.rebuild(chain.path)
    named = Loss(None, None, None, None) if damage == "noise" else Loss("/corpus", "b.md", 1, None)
    assert rebuilt.losses == [named]
    assert rebuilt.damages
    assert [record.doc_id for record in chain.documents()] == ["a.md"]
    assert build(chain, doc_id="b.md", seed=5).version == 1


def test_what_only_the_old_manifest_knew_is_named(chain):
    record_file(chain, chain.head("/corpus", "a.md")).unlink()
    assert Store.rebuild(chain.path).losses == [Loss("/corpus", "a.md", 2, 1)]


def test_a_damaged_previous_version_is_left_out_and_no_loss(chain):
    record_file(chain, chain.version("/corpus", "a.md", 1)).write_bytes(b"{")
    rebuilt = Store.rebuild(chain.path)
    assert (len(rebuilt.damages), rebuilt.losses) == (1, [])
    assert chain.head("/corpus", "a.md").version == 2


def test_of_two_records_of_one_number_the_one_that_was_built_upon_is_taken(store, monkeypatch):
    monkeypatch.setattr(commits.Committer, "_remove", lambda *_: None)
    first = edit(store, build(store))
    folded = store.compact(first)
    assert folded.record_id != first.record_id
    Store.rebuild(store.path)
    assert store.head("/corpus", "a.md") == folded
    second = edit(store, folded, text="three", seed=3)
    Store.rebuild(store.path)
    assert store.head("/corpus", "a.md") == second
    assert store.previous(second) == folded
    assert store.verify() == []


def test_a_commit_that_was_killed_is_unlisted_until_a_rebuild(chain, monkeypatch):
    assert commit_in_child(chain.path, monkeypatch, "transaction done", False, 1, text="never committed", seed=7)
    assert chain.verify() == []
    [record] = chain.unlisted()
    assert (record.doc_id, record.version) == ("a.md", 3)
    Store.rebuild(chain.path)
    assert chain.snapshot(chain.head("/corpus", "a.md")).text == "never committed"
    assert chain.unlisted() == []


def test_a_dry_run_changes_nothing(chain):
    before = {path: path.read_bytes() for path in chain.path.rglob("*") if path.is_file()}
    rebuilt = Store.rebuild(chain.path, dry_run=True)
    assert (rebuilt.num_documents, rebuilt.num_versions, rebuilt.set_aside) == (2, 3, None)
    assert {path: path.read_bytes() for path in chain.path.rglob("*") if path.is_file()} == before


def test_a_rebuild_waits_for_the_writer_and_needs_a_store(chain, tmp_path):
    with chain.writing("build"), pytest.raises(StoreBusyError, match="kvfix build"):
        Store.rebuild(chain.path)
    with pytest.raises(StoreMissingError):
        Store.rebuild(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("step", ["files.sync_file", "files.publish", "rebuild._set_aside"])
def test_a_rebuild_that_fails_leaves_the_manifest_as_it_was(chain, monkeypatch, step):
    before = (chain.path / "manifest.sqlite").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(f"kvfix.store.{step}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            Store.rebuild(chain.path)
    assert (chain.path / "manifest.sqlite").read_bytes() == before
    assert list((chain.path / "tmp").iterdir()) == []
    assert chain.verify() == []


def test_a_manifest_whose_head_is_not_the_newest_version_is_found(chain):
    with sqlite3.connect(chain.path / "manifest.sqlite") as connection:
        connection.execute("UPDATE documents SET version = 1 WHERE doc_id = 'a.md'")
        connection.execute("DELETE FROM documents WHERE doc_id = 'b.md'")
        connection.execute("UPDATE meta SET value = '7' WHERE key = 'keep'")
    assert {(item.doc, item.version) for item in chain.verify()} == {("a.md", 2), ("b.md", 1), (None, None)}
    Store.rebuild(chain.path)
    assert chain.verify() == []


def test_the_seal_is_about_the_settings_alone(chain):
    with sqlite3.connect(chain.path / "manifest.sqlite") as connection:
        connection.execute("INSERT INTO meta VALUES ('note:x', 'y')")
    assert chain.verify() == []


def test_a_store_without_a_seal_is_sound(chain):
    with sqlite3.connect(chain.path / "manifest.sqlite") as connection:
        connection.execute("DELETE FROM meta WHERE key = 'seal'")
    with Store.open(chain.path) as again:
        assert again.verify() == []


def test_the_tables_hold_nothing_that_records_models_and_gates_do_not():
    assert set(schema.metadata.tables) == {"meta", "versions", "documents", "segments", "models", "gates"}


def test_restoring_goes_back_and_forth(chain):
    second = chain.head("/corpus", "a.md")
    old, new = (loaded(chain.snapshot(chain.version("/corpus", "a.md", number))) for number in (1, 2))
    third = chain.restore(second)
    assert (third.version, third.parent, third.text_sha256) == (3, second.record_id, document("one two three").sha256)
    assert torch.equal(loaded(chain.snapshot(third, check=True))[0], old[0])
    with pytest.raises(StoreBusyError):
        chain.restore(second)
    fourth = chain.restore(third)
    assert torch.equal(loaded(chain.snapshot(fourth, check=True))[1], new[1])
    assert chain.verify() == []


def test_restoring_in_a_store_that_keeps_nothing(chain):
    old = loaded(chain.snapshot(chain.version("/corpus", "a.md", 1)))
    with Store.open(chain.path, keep=0) as store:
        third = store.restore(store.head("/corpus", "a.md"))
        assert torch.equal(loaded(store.snapshot(third, check=True))[0], old[0])
        with pytest.raises(UsageError, match="no version before version 3"):
            store.restore(third)
        assert [store.version("/corpus", "a.md", number) for number in (1, 2)] == [None, None]
        assert (store.verify(), store.gc(min_age_s=0).num_files) == ([], 0)


def test_a_damaged_version_is_not_restored(chain):
    second = chain.head("/corpus", "a.md")
    file = segment_file(chain, chain.version("/corpus", "a.md", 1), 0)
    flip(file, file.stat().st_size - 20)
    with pytest.raises(StoreDamagedError, match=file.name):
        chain.restore(second)
    assert chain.head("/corpus", "a.md") == second
