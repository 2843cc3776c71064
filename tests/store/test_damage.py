"""Damaged files are found, named and kept from hiding one another."""

from __future__ import annotations

import random
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from kvfix.errors import StoreDamagedError
from kvfix.store import Store, records
from tests.store.helpers import KEY, build, edit


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A store of three documents (two of them twins), each with two versions, and a gate report."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with Store.open(path, create=True) as store:
        for doc_id, seed in (("a.md", 0), ("b.md", 0), ("c.md", 1)):
            edit(store, build(store, doc_id=doc_id, seed=seed), seed=seed)
        store.save_gate(KEY.fingerprint, "sdpa", {"error": 1e-7, "note": "ü"})
        assert store.verify() == []
    return path


@pytest.fixture
def path(sound, tmp_path) -> Path:
    return shutil.copytree(sound, tmp_path / "store")


def flip(file: Path, offset: int, mask: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= mask
    file.write_bytes(content)


def content_files(path: Path) -> list[Path]:
    return sorted(p for kind in ("objects", "records", "models", "gates") for p in (path / kind).rglob("*.*"))


@pytest.mark.parametrize("number", range(9))
def test_every_flipped_bit_is_found_and_named(path, number):
    generator = random.Random(number)
    files = content_files(path)
    assert len(files) == 12
    with Store.open(path, read_only=True) as store:
        for file in files:
            sane = file.read_bytes()
            offset = generator.choice([0, 7, 8, len(sane) // 2, len(sane) - 1, generator.randrange(len(sane))])
            flip(file, offset, 1 << generator.randrange(8))
            found = store.verify()
            assert {item.path for item in found} == {file.relative_to(path).as_posix()}
            file.write_bytes(sane)
        assert store.verify() == []


def test_every_byte_of_a_record_a_model_and_a_gate_counts(path):
    with Store.open(path, read_only=True) as store:
        for kind in ("records", "models", "gates"):
            file = next((path / kind).rglob("*.json"))
            sane = file.read_bytes()
            for offset in range(len(kind), len(sane), 17):
                flip(file, offset, 0x20)
                assert store.verify(), (kind, offset)
                file.write_bytes(sane)


def test_a_flipped_bit_that_means_the_same_is_found_too(path):
    file = next((path / "gates").glob("*"))
    flip(file, file.read_bytes().index(b"\\u00fc") + 5, 0x20)
    with Store.open(path, read_only=True) as store:
        assert [item.path for item in store.verify()] == [file.relative_to(path).as_posix()]


def test_a_changed_header_that_leaves_every_tensor_its_bytes_is_found(path):
    with Store.open(path, read_only=True) as store:
        name = store.detail(store.head("/corpus", "c.md")).segments[0].name
        file = path / "objects" / name[:2] / f"{name}.safetensors"
        content = file.read_bytes()
        file.write_bytes(content.replace(b'"I64"', b'"U64"', 1))
        assert {item.path for item in store.verify()} == {file.relative_to(path).as_posix()}


def test_a_sound_model_file_under_another_models_name_is_found(path):
    file = path / "models" / f"{KEY.fingerprint}.json"
    with Store.open(path) as store:
        other = replace(KEY, dtype="bfloat16")
        store.save_model(other)
        shutil.copy(path / "models" / f"{other.fingerprint}.json", file)
        with pytest.raises(StoreDamagedError, match="another model"):
            store.model(KEY.fingerprint)
        assert {item.path for item in store.verify()} == {file.relative_to(path).as_posix()}


def test_a_damaged_segment_is_named_with_every_document_that_needs_it(path):
    with Store.open(path, read_only=True) as store:
        base = store.detail(store.version("/corpus", "a.md", 1)).segments[0]
        file = path / "objects" / base.name[:2] / f"{base.name}.safetensors"
        flip(file, file.stat().st_size - 100, 1)
        found = store.verify()
        assert {(item.doc, item.version) for item in found} == {(d, v) for d in ("a.md", "b.md") for v in (1, 2)}
        assert all("'values'" in item.what for item in found)
        assert [item.doc for item in store.verify(store.documents()[2:])] == []
        assert {item.version for item in store.verify(store.documents()[:1])} == {2}
        with pytest.raises(StoreDamagedError, match=base.name):
            store.snapshot(store.head("/corpus", "a.md"), check=True)
        store.snapshot(store.head("/corpus", "c.md"), check=True)


def test_a_small_tensor_is_checked_even_without_being_asked(path):
    with Store.open(path, read_only=True) as store:
        record = store.head("/corpus", "a.md")
        name = store.detail(record).segments[1].name
        file = path / "objects" / name[:2] / f"{name}.safetensors"
        content = file.read_bytes()
        header = int.from_bytes(content[:8], "little")
        flip(file, 8 + header, 4)
        with pytest.raises(StoreDamagedError, match=name):
            store.snapshot(record)


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "cut in the header": lambda file: file.write_bytes(file.read_bytes()[:20]),
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "huge header": lambda file: file.write_bytes((1 << 63).to_bytes(8, "little") + file.read_bytes()[8:]),
    "header beyond the end": lambda file: file.write_bytes((10_000).to_bytes(8, "little") + file.read_bytes()[8:]),
    "header of noise": lambda file: file.write_bytes(file.read_bytes()[:8] + b"{" * (file.stat().st_size - 8)),
    "a pickle": lambda file: file.write_bytes(b"\x80\x04N.".ljust(file.stat().st_size, b"\0")),
    "missing": lambda file: file.unlink(),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("which", ["segment", "record", "model"])
def test_a_broken_file_is_named_and_others_are_unaffected(path, which, kind):
    with Store.open(path) as store:
        record = store.head("/corpus", "c.md")
        name = store.detail(record).segments[0].name
        file = {
            "segment": path / "objects" / name[:2] / f"{name}.safetensors",
            "record": path / "records" / record.record_id[:2] / f"{record.record_id}.json",
            "model": path / "models" / f"{KEY.fingerprint}.json",
        }[which]
        DAMAGE[kind](file)
        found = store.verify()
        assert {item.path for item in found} == {file.relative_to(path).as_posix()}
        affected = {"segment": {"c.md"}, "record": {"c.md"}, "model": {"a.md", "b.md", "c.md"}}[which]
        assert {item.doc for item in found} == affected
        if which == "model":
            return
        with pytest.raises(StoreDamagedError, match=file.name) as caught:
            store.snapshot(record)
        assert caught.value.exit_code == 6
        assert edit(store, store.head("/corpus", "a.md"), text="new", seed=8).version == 3
        assert len(store.documents()) == 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "bytes instead of"),
        ("longer", "bytes instead of"),
        ("empty", "it has 0 bytes instead of"),
        ("huge header", f"its header claims {1 << 63} bytes"),
        ("header beyond the end", "its header claims 10000 bytes"),
        ("missing", "it is missing, and c.md needs it"),
        ("a directory", "it is not a file"),
    ],
)
def test_what_is_wrong_with_a_segment_is_said(path, kind, words):
    with Store.open(path) as store:
        record = store.head("/corpus", "c.md")
        name = store.detail(record).segments[0].name
        DAMAGE[kind](path / "objects" / name[:2] / f"{name}.safetensors")
        with pytest.raises(StoreDamagedError, match=words):
            store.snapshot(record)


def test_a_new_base_mends_a_document_and_a_damaged_file_of_the_same_content(path):
    with Store.open(path) as store:
        base = store.detail(store.version("/corpus", "c.md", 1)).segments[0]
        file = path / "objects" / base.name[:2] / f"{base.name}.safetensors"
        flip(file, 4000, 1)
        assert store.verify()
        build(store, doc_id="c.md", seed=1)
        assert store.verify() == []


def test_a_row_that_differs_from_its_record_is_found(path):
    with sqlite3.connect(path / "manifest.sqlite") as connection:
        connection.execute("UPDATE versions SET stale_rows = 0 WHERE doc_id = 'a.md' AND version = 2")
        connection.execute("UPDATE segments SET name = ? WHERE doc_id = 'b.md' AND ordinal = 1", ("0" * 64,))
        connection.execute("UPDATE documents SET version = 7 WHERE doc_id = 'c.md'")
    with Store.open(path, read_only=True) as store:
        found = {(item.doc, item.version): item.what for item in store.verify()}
    assert set(found) == {("a.md", 2), ("b.md", 2), ("c.md", 7)}
    assert "stale_rows" in found["a.md", 2]
    assert "segments" in found["b.md", 2]


@pytest.mark.parametrize("changes", [{"text_sha256": "0" * 64}, {"token_sha256": "0" * 64}, {"num_tokens": 19}])
def test_segments_that_compose_to_another_document_than_recorded_are_refused(path, changes):
    with Store.open(path) as store:
        detail = store.detail(store.head("/corpus", "c.md"))
        forged, content = records.encode(replace(detail, record=replace(detail.record, written_bytes=0, **changes)))
        file = path / "records" / forged.record_id[:2] / f"{forged.record_id}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        with sqlite3.connect(path / "manifest.sqlite") as connection:
            for name, value in {"record_id": forged.record_id, "written_bytes": len(content), **changes}.items():
                connection.execute(f"UPDATE versions SET {name} = ? WHERE doc_id = 'c.md' AND version = 2", (value,))
        with pytest.raises(StoreDamagedError, match="not those of version 2"):
            store.snapshot(store.head("/corpus", "c.md"))
        assert {(item.doc, item.version) for item in store.verify()} == {("c.md", 2)}


def test_names_in_the_manifest_cannot_lead_out_of_the_store(path):
    with sqlite3.connect(path / "manifest.sqlite") as connection:
        connection.execute("UPDATE versions SET record_id = '../../../../etc/passwd' WHERE version = 2")
        connection.execute("UPDATE versions SET model = '../../x'")
    with Store.open(path, read_only=True) as store:
        with pytest.raises(StoreDamagedError, match="no name"):
            store.snapshot(store.head("/corpus", "a.md"))
        assert {item.doc for item in store.verify()} == {"a.md", "b.md", "c.md"}


@pytest.mark.parametrize(
    "which", ["objects/*/*", "records/*/*", "objects/??", "objects", "models/*", "manifest.sqlite"]
)
def test_a_symbolic_link_inside_the_store_is_refused(path, tmp_path, which):
    for file in sorted(path.glob(which)):
        target = tmp_path / f"outside-{file.name}"
        shutil.move(file, target)
        file.symlink_to(target)
    with pytest.raises(StoreDamagedError, match="symbolic link"):
        open_all(path)


def open_all(path: Path) -> None:
    with Store.open(path) as store:
        for record in store.documents():
            store.model(record.model)
            store.snapshot(record)


@pytest.mark.parametrize("which", ["tmp", "objects", "records"])
def test_a_linked_directory_is_neither_written_nor_cleaned_through(path, tmp_path, which):
    outside = tmp_path / "outside"
    (outside / "00").mkdir(parents=True)
    (outside / "00" / f"{'0' * 64}.json").write_text("precious")
    shutil.rmtree(path / which)
    (path / which).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with Store.open(path) as store:
        with pytest.raises(StoreDamagedError, match="symbolic link"):
            build(store, doc_id="d.md")
        with pytest.raises(StoreDamagedError, match="symbolic link"):
            store.gc(min_age_s=0)
        assert store.verify() or which == "tmp"
    assert sorted(outside.rglob("*")) == before


def test_gc_believes_the_records_where_the_manifest_has_lost_a_reference(path):
    with sqlite3.connect(path / "manifest.sqlite") as connection:
        connection.execute("DELETE FROM segments")
    with Store.open(path) as store:
        assert store.gc(min_age_s=0).num_files == 0
        store.snapshot(store.head("/corpus", "a.md"), check=True)


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_manifest_of_noise_says_how_to_get_it_back(path, content):
    (path / "manifest.sqlite").write_bytes(content)
    with pytest.raises(StoreDamagedError, match="fsck --rebuild"):
        Store.open(path)


def test_a_manifest_with_noise_in_the_middle_is_an_error_of_the_store(path):
    manifest = path / "manifest.sqlite"
    content = bytearray(manifest.read_bytes())
    content[4096:] = random.Random(1).randbytes(len(content) - 4096)
    manifest.write_bytes(content)
    with pytest.raises(StoreDamagedError, match=r"manifest\.sqlite"):
        open_all(path)


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("left", [None, b""])
def test_a_lost_manifest_is_not_mistaken_for_no_store(path, create, left):
    (path / "manifest.sqlite").unlink()
    if left is not None:
        (path / "manifest.sqlite").write_bytes(left)
    with pytest.raises(StoreDamagedError, match="fsck --rebuild"):
        Store.open(path, create=create)


def test_garbage_that_is_damaged_is_named_without_a_document(path):
    with Store.open(path) as store:
        name = store.detail(store.head("/corpus", "c.md")).segments[0].name
        stray = path / "objects" / "00" / f"{'0' * 64}.safetensors"
        stray.parent.mkdir(exist_ok=True)
        shutil.copy(path / "objects" / name[:2] / f"{name}.safetensors", stray)
        assert [(item.doc, item.path) for item in store.verify()] == [(None, stray.relative_to(path).as_posix())]
        assert store.gc(min_age_s=0).num_files == 1
        assert store.verify() == []
