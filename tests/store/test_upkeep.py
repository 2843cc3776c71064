"""What gc removes and leaves, and what things cost."""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from sqlalchemy import insert

from kvfix.core import Debt, KVCache
from kvfix.store import Store, schema
from tests.store.helpers import DIM, HEADS, KEY, LAYERS, build, cache_of, document, edit, exact


def age(path, seconds: float) -> None:
    for part in [path, *path.rglob("*")]:
        then = time.time() - seconds
        os.utime(part, (then, then))


def strays(store: Store) -> list:
    """A segment, a record and a temporary file that nothing refers to."""
    digest = "0" * 64
    left = [
        store.path / "objects" / "00" / f"{digest}.safetensors",
        store.path / "records" / "00" / f"{digest}.json",
        store.path / "tmp" / "123-abc" / "new",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
    return left


def test_gc_leaves_what_is_young_or_needed_or_not_kvfixs(store):
    record = edit(store, build(store))
    age(store.path, 100_000)
    left = strays(store)
    foreign = store.path / "objects" / "00" / "README"
    foreign.write_text("x")
    assert store.gc().num_files == 0
    for path in left:
        age(path.parent, 3700)
    report = store.gc()
    assert (report.num_files, report.bytes) == (3, 15)
    assert not any(path.exists() for path in left)
    assert list((store.path / "tmp").iterdir()) == []
    assert foreign.exists()
    assert store.snapshot(record, check=True).text == "one 2 three"
    assert store.verify() == []


def test_gc_removes_what_a_commit_could_not(store, monkeypatch):
    monkeypatch.setattr("kvfix.store.commits.Committer._remove", lambda *_: None)
    record = build(store)
    for number in range(3):
        record = store.commit_base(document(f"{number}"), KEY, cache_of(5, number), exact(5), {}, record)
    assert store.gc(min_age_s=0).num_files == 4
    assert len(list(store.path.glob("objects/*/*"))) == 2
    assert store.verify() == []


def numbers(store: Store, doc_id: str = "a.md") -> list[int]:
    return [n for n in range(1, 20) if store.version("/corpus", doc_id, n)]


@pytest.mark.parametrize(("keep", "kept"), [(0, [6]), (1, [5, 6]), (3, [3, 4, 5, 6]), (None, [5, 6])])
def test_a_commit_leaves_as_many_versions_as_asked(tmp_path, keep, kept):
    with Store.open(tmp_path / "s", create=True, keep=keep) as store:
        record = build(store)
        for number in range(5):
            record = edit(store, record, text=f"text {number}", seed=number)
        assert numbers(store) == kept
        assert store.gc(min_age_s=0).num_files == 0
        assert store.verify() == []


@pytest.mark.parametrize(("keep", "kept"), [(0, [6]), (1, [5, 6]), (3, [3, 4, 5, 6]), (None, [1, 2, 3, 4, 5, 6])])
def test_gc_leaves_as_many_versions_as_asked(tmp_path, keep, kept):
    with Store.open(tmp_path / "s", create=True, keep=9) as store:
        record = build(store, doc_id="b.md")
        record = build(store)
        for number in range(5):
            record = edit(store, record, text=f"text {number}", seed=number)
    with Store.open(tmp_path / "s", keep=keep) as store:
        planned = store.gc(dry_run=True)
        assert numbers(store) == [1, 2, 3, 4, 5, 6]
        report = store.gc()
        assert report == planned
        assert report.num_versions == report.num_files == 6 - len(kept)
        assert report.stored_bytes == store.stored_bytes()
        assert numbers(store) == kept
        assert numbers(store, "b.md") == [1]
        assert store.snapshot(record, check=True).text == "text 4"
        assert (store.verify(), store.gc(min_age_s=0).num_files) == ([], 0)


def test_gc_to_a_size_drops_previous_versions_the_oldest_first_and_never_a_head(tmp_path):
    with Store.open(tmp_path / "s", create=True, keep=9) as store:
        for number in range(4):
            for doc_id in ("a.md", "b.md"):
                build(store, text=f"text {number}", num_rows=50, seed=number, doc_id=doc_id)
    with Store.open(tmp_path / "s") as store:
        sizes = [store.stored_bytes()]
        for versions in ([2, 3, 4], [1, 2, 3, 4]), ([2, 3, 4], [2, 3, 4]), ([3, 4], [2, 3, 4]):
            assert store.gc(max_bytes=sizes[-1], dry_run=True).num_versions == 0
            report = store.gc(max_bytes=sizes[-1] - 1)
            assert (report.num_versions, report.over_bytes) == (1, 0)
            assert (numbers(store), numbers(store, "b.md")) == versions
            sizes.append(store.stored_bytes())
            assert report.stored_bytes == sizes[-1]
        report = store.gc(max_bytes=10, dry_run=True)
        assert report == store.gc(max_bytes=10)
        assert (numbers(store), numbers(store, "b.md")) == ([4], [4])
        assert report.over_bytes == store.stored_bytes() - 10
        assert (store.verify(), store.gc(min_age_s=0).num_files) == ([], 0)


def test_a_dry_gc_touches_nothing_and_needs_no_lock(store):
    build(store)
    left = strays(store)
    with Store.open(store.path, read_only=True) as reader, store.writing("build"):
        report = reader.gc(min_age_s=0, dry_run=True)
    assert (report.num_files, report.bytes) == (3, 15)
    assert all(path.exists() for path in left)
    assert store.gc(min_age_s=0).num_files == 3


def test_tombstones_are_forgotten_in_the_end(store):
    build(store)
    store.remove("/corpus", "a.md")
    store.gc(min_age_s=0)
    assert len(list(store.path.glob("records/*/*"))) == 1
    with sqlite3.connect(store.path / "manifest.sqlite") as connection:
        connection.execute("UPDATE versions SET created_at = '2020-01-01T00:00:00+00:00'")
    store.gc(min_age_s=0)
    assert store.gc(min_age_s=0).num_files == 1
    assert build(store).version == 1


def test_five_hundred_edits_do_not_make_the_store_grow(store):
    record = build(store, num_rows=40)
    sizes = []
    for number in range(500):
        record = edit(store, record, text=f"text {number}", seed=number)
        if number % 50 == 49:
            sizes.append(sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file()))
    assert record.version == 501
    assert max(sizes) < 1.5 * sizes[0]
    assert store.verify() == []


@pytest.mark.parametrize("shift", [0, 7, -7])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_an_edit_writes_little_more_than_its_rows(store, num_rows, shift):
    """Rows of 46 kB, a text of 20 kB."""
    wide = 46_080 // (4 * LAYERS * HEADS * 2)
    num_rows = max(num_rows, shift)
    words = " ".join(str(number * number) for number in range(3200))[:20_000]
    old_tokens = 600
    keys = torch.randn(LAYERS, HEADS, old_tokens, wide)
    ids = np.arange(old_tokens)
    base = store.commit_base(document(words), KEY, KVCache(keys, keys.clone(), ids, ids), exact(old_tokens), {}, None)
    num_tokens = old_tokens + shift
    positions = np.arange(100, 100 + num_rows)
    source = np.concatenate([np.arange(100), np.full(max(shift, 0), -1), np.arange(100 + max(-shift, 0), old_tokens)])
    source[positions] = -1
    new_ids = np.where(source < 0, 7, source)
    rows = torch.randn(LAYERS, HEADS, num_rows, wide)
    report = {"probes": [{"question": "what is it " * 8, "margin": -1.23456789 * n} for n in range(8)]}
    patch = store.commit_patch(
        document(words[:9000] + "edited" + words[9003 + shift :]),
        KEY,
        store.snapshot(base),
        source,
        positions,
        rows,
        rows.clone(),
        new_ids,
        Debt(100, num_tokens, ((0, 100), (1, num_tokens - 100))),
        report,
        base,
    )
    assert patch.kind == "patch"
    assert patch.row_bytes == pytest.approx(46_080, abs=100)
    assert patch.written_bytes <= 1.25 * num_rows * patch.row_bytes


def test_opening_reads_no_rows(store, monkeypatch):
    record = build(store, num_rows=2000)
    read = []
    real = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda self, *a, **k: read.append(self.nbytes) or real(self, *a, **k))
    store.snapshot(record)
    assert sum(read) < 3 * 2000 * 8 * 2 + 1000
    rows_bytes = LAYERS * HEADS * 2000 * DIM * 4
    read.clear()
    store.snapshot(record, check=True)
    assert sum(read) > 2 * rows_bytes


def test_ten_thousand_documents_are_listed_in_one_query_and_no_time(store):
    record = build(store)
    rows = [asdict(replace(record, doc_id=f"{n:05}.md", record_id=f"{n:064x}")) for n in range(10_000)]
    with store._manifest.database.writing() as connection:
        connection.execute(insert(schema.versions), rows)
        heads = [{name: row[name] for name in schema.KEY} for row in rows]
        connection.execute(insert(schema.documents), heads)
    start = time.perf_counter()
    found = store.documents("/corpus")
    taken = time.perf_counter() - start
    assert len(found) == 10_001
    assert [record.doc_id for record in found[:2]] == ["00000.md", "00001.md"]
    assert sum(record.cache_bytes for record in found) == 10_001 * 20 * record.row_bytes
    assert taken < 2


def test_a_trial_write_leaves_nothing_and_needs_finite_rows(store):
    record = build(store)
    before = sorted(store.path.rglob("*"))
    size = store.try_write(document("one two three"), cache_of(20))
    assert size == record.stored_bytes
    assert sorted(store.path.rglob("*")) == before
    assert store.snapshot(record, check=True).record == record


def test_odd_reports_are_stored_as_plain_json(store):
    report = {"a": np.float32(1.5), "b": (1, float("nan")), "c": np.arange(2), "quality": {"mr_median": np.float64(2)}}
    cache = cache_of(3)
    record = store.commit_base(document("x"), KEY, cache, exact(3), report, None)
    assert store.detail(record).report == {"a": 1.5, "b": [1, None], "c": [0, 1], "quality": {"mr_median": 2.0}}
    assert record.last_mr == 2.0


def test_what_a_pass_left_is_remembered_by_corpus(store):
    assert store.left("/docs") == []
    store.set_left("/docs", ["b.md", "a\n\u00e9.md"])
    store.set_left("/other", ["c.md"])
    with Store.open(store.path) as again:
        assert again.left("/docs") == ["b.md", "a\n\u00e9.md"]
        again.set_left("/docs", [])
        assert (again.left("/docs"), again.left("/other")) == ([], ["c.md"])
    assert store.verify() == []


def test_a_note_that_makes_no_sense_is_none(store):
    store._manifest.set_note("left:/docs", "{")
    assert store.left("/docs") == []
    store._manifest.set_note("left:/docs", '[1, "a.md"]')
    assert store.left("/docs") == ["a.md"]
