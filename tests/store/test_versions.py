"""What a store gives back is what was put in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvfix.core import Debt, ModelKey
from kvfix.errors import ModelMismatchError, NonFiniteError, StoreBusyError, UnknownDocumentError
from kvfix.store import Store, should_fold
from tests.store.helpers import DIM, HEADS, KEY, LAYERS, build, cache_of, document, edit, exact, loaded, random_rows


def files_of(store: Store) -> set[str]:
    return {str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file()} - {"lock"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_base_comes_back_bit_for_bit_without_its_spare_room(store, dtype):
    cache = cache_of(13, room=5, dtype=dtype)
    record = store.commit_base(document("a text – ünïcode"), KEY, cache, exact(13), {"a": 1}, None)
    snapshot = store.snapshot(record, check=True)
    keys, values = loaded(snapshot)
    assert keys.dtype == dtype
    assert torch.equal(keys, cache.keys[:, :, :13])
    assert torch.equal(values, cache.values[:, :, :13])
    assert snapshot.token_ids.tolist() == cache.token_ids.tolist()
    assert snapshot.rows.origin.tolist() == list(range(13))
    assert snapshot.text == "a text – ünïcode"
    assert record.row_bytes == cache.row_bytes
    assert record.cache_bytes == 13 * cache.row_bytes
    assert (record.version, record.kind, record.num_prefix, record.model) == (1, "base", 1, KEY.fingerprint)


def test_mapped_rows_are_views_of_the_file_and_writing_to_them_does_not_change_it(store):
    record = build(store)
    first = store.snapshot(record)
    first.segments[0].keys.fill_(7)
    assert not torch.equal(store.snapshot(record).segments[0].keys, first.segments[0].keys)
    assert first.segments[0].name in Path("/proc/self/maps").read_text()
    assert store.verify() == []


def test_an_edit_overlays_its_rows_and_keeps_the_rest(store):
    base = build(store)
    patch = edit(store, base, positions=(3, 9), report={"quality": {"mr_median": 0.9}})
    before, after = store.snapshot(base), store.snapshot(patch, check=True)
    keys, values = random_rows(2, seed=1)
    expected_keys, expected_values = loaded(before)
    expected_keys[:, :, [3, 9]], expected_values[:, :, [3, 9]] = keys, values
    assert torch.equal(loaded(after)[0], expected_keys)
    assert torch.equal(loaded(after)[1], expected_values)
    assert after.text == "one 2 three"
    assert (patch.kind, patch.version, patch.parent, patch.last_mr) == ("patch", 2, base.record_id, 0.9)
    assert (patch.stale_rows, patch.edits_behind, patch.state) == (17, 1, "repaired")
    assert patch.debt == Debt(3, 20, ((1, 20),))
    assert store.detail(patch).report == {"quality": {"mr_median": 0.9}}
    assert store.previous(patch) == base


def test_written_bytes_are_those_of_the_new_files(store):
    base = build(store)
    before = files_of(store)
    patch = edit(store, base)
    new = files_of(store) - before
    assert len(new) == 2
    assert patch.written_bytes == sum((store.path / name).stat().st_size for name in new)
    assert patch.stored_bytes == sum(path.stat().st_size for path in store.path.glob("objects/*/*"))


def test_an_empty_document_keeps_its_text_and_can_grow_and_shrink(store):
    record = store.commit_base(document("\n"), KEY, None, exact(0), {}, None)
    snapshot = store.snapshot(record)
    assert (record.kind, snapshot.text, len(snapshot.token_ids), snapshot.segments) == ("empty", "\n", 0, ())
    keys, values = random_rows(3)
    ids = np.array([5, 6, 7])
    grown = store.commit_patch(
        document("abc"), KEY, snapshot, np.full(3, -1), np.arange(3), keys, values, ids, exact(3), {}, record
    )
    assert grown.kind == "base"
    assert torch.equal(loaded(store.snapshot(grown))[0], keys)
    none = np.zeros(0, np.int64)
    nothing = random_rows(0)
    shrunk = store.commit_patch(
        document(""), KEY, store.snapshot(grown), none, none, *nothing, none, exact(0), {}, grown
    )
    assert (shrunk.kind, shrunk.version) == ("empty", 3)
    assert store.verify() == []


def test_a_pure_deletion_writes_a_patch_without_rows(store):
    base = build(store)
    snapshot = store.snapshot(base)
    source = np.arange(15)
    none = np.zeros(0, np.int64)
    cut = store.commit_patch(
        document("one"), KEY, snapshot, source, none, *random_rows(0), snapshot.token_ids[:15], exact(15), {}, base
    )
    assert (cut.kind, cut.patch_rows) == ("patch", 0)
    assert torch.equal(loaded(store.snapshot(cut, check=True))[0], loaded(snapshot)[0][:, :, :15])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_refused_before_anything_is_written(store, bad):
    base = build(store)
    before = files_of(store)
    cache = cache_of(20)
    cache.values[1, 2, 19, 0] = bad
    with pytest.raises(NonFiniteError):
        store.commit_base(document("x"), KEY, cache, exact(20), {}, base)
    keys, values = random_rows(1)
    keys[1, 0, 0, DIM - 1] = bad
    snapshot = store.snapshot(base)
    source = np.arange(20)
    with pytest.raises(NonFiniteError):
        store.commit_patch(
            document("x"), KEY, snapshot, source, np.array([4]), keys, values, snapshot.token_ids, exact(20), {}, base
        )
    assert files_of(store) == before
    assert store.head("/corpus", "a.md") == base


def test_spare_room_may_hold_anything(store):
    cache = cache_of(4, room=2)
    cache.keys[:, :, 4:] = float("nan")
    assert store.commit_base(document("x"), KEY, cache, exact(4), {}, None).num_tokens == 4


def patch_with(store, base, **changes):
    """An edit of one row whose arguments are wrong in some way."""
    snapshot = store.snapshot(base)
    keys, values = random_rows(1)
    source = np.arange(20)
    source[4] = -1
    given = {
        "document": document("x"),
        "key": KEY,
        "snapshot": snapshot,
        "source": source,
        "positions": np.array([4]),
        "keys": keys,
        "values": values,
        "token_ids": snapshot.token_ids.copy(),
        "debt": exact(20),
        "report": {},
        "expect": base,
    }
    return store.commit_patch(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": np.array([5])}, "neither new nor kept"),
        ({"source": np.arange(19)}, "source map"),
        ({"source": np.arange(20) + 1}, "source map"),
        ({"source": np.roll(np.arange(20), 1)}, "another token"),
        ({"positions": np.array([20])}, "ascending"),
        ({"positions": np.array([4, 4]), "keys": random_rows(2)[0], "values": random_rows(2)[1]}, "ascending"),
        ({"keys": random_rows(2)[0]}, "2 rows of keys"),
        ({"keys": random_rows(1)[0][:1]}, "cannot join"),
        ({"values": random_rows(1)[1].half()}, "cannot join"),
        ({"debt": exact(19)}, "debt"),
        ({"document": document("x").__class__("/corpus", "a.md", "x", "0" * 64)}, "checksum"),
    ],
)
def test_an_edit_that_does_not_fit_its_snapshot_is_refused(store, changes, message):
    base = build(store)
    before = files_of(store)
    with pytest.raises(ValueError, match=message):
        patch_with(store, base, **changes)
    assert files_of(store) == before


def test_an_edit_with_another_model_is_refused_by_name(store):
    base = build(store)
    other = ModelKey(**{**KEY.__dict__, "dtype": "bfloat16"})
    with pytest.raises(ModelMismatchError, match="dtype"):
        patch_with(store, base, key=other)


def test_of_two_edits_from_one_version_the_second_is_told(store):
    base = build(store)
    first = edit(store, base)
    with pytest.raises(StoreBusyError, match="changed"):
        edit(store, base, text="other")
    with pytest.raises(StoreBusyError, match="changed"):
        store.commit_base(document("x"), KEY, cache_of(4), exact(4), {}, None)
    with pytest.raises(StoreBusyError, match="changed"):
        store.commit_base(document("x"), KEY, cache_of(4), exact(4), {}, base)
    assert store.head("/corpus", "a.md") == first
    assert store.gc(min_age_s=0).num_files == 0


def test_an_edit_of_an_older_version_cannot_undo_the_head(store):
    base = build(store)
    snapshot = store.snapshot(base)
    head = edit(store, base)
    for expect in (head, None):
        with pytest.raises(StoreBusyError, match="changed"):
            patch_with(store, base, snapshot=snapshot, expect=expect)
    assert store.head("/corpus", "a.md") == head


def test_the_transaction_itself_compares_the_head(store, monkeypatch):
    base = build(store)
    monkeypatch.setattr("kvfix.store.commits.check_expected", lambda head, change: None)
    edit(store, base)
    before = store.snapshot(base)
    with pytest.raises(StoreBusyError, match="changed"):
        patch_with(store, base, snapshot=before)
    assert store.head("/corpus", "a.md").version == 2
    assert store.verify() == []


def test_one_version_before_the_head_is_kept_and_the_files_of_older_ones_go(store):
    first = build(store, num_rows=100)
    records = [first]
    for number in range(20):
        records.append(edit(store, records[-1], text=f"text {number}", seed=number))
        assert len(list(store.path.glob("records/*/*"))) == min(2, number + 2)
        assert len(list(store.path.glob("objects/*/*"))) <= 11
    assert store.previous(records[-1]) == records[-2]
    assert store.previous(records[-2]) is None
    assert store.verify() == []
    assert store.gc(min_age_s=0).num_files == 0


def test_a_reader_keeps_what_it_has_open_and_a_late_one_gets_the_head(store):
    base = build(store)
    early = store.snapshot(base)
    keys = loaded(early)[0].clone()
    head = base
    for number in range(3):
        head = store.commit_base(document(f"{number}"), KEY, cache_of(20, seed=number + 5), exact(20), {}, head)
    assert torch.equal(loaded(early)[0], keys)
    assert store.snapshot(base).record == head


def test_patches_fold_into_a_base_after_eight_or_when_they_outgrow_it(store):
    record = build(store, num_rows=100)
    kinds = []
    for number in range(9):
        record = edit(store, record, text=f"{number}", seed=number)
        kinds.append(record.kind)
    assert kinds == ["patch"] * 8 + ["base"]
    assert not should_fold(record, 101)
    assert store.previous(record).num_patches == 8
    once = edit(store, record, text="once more")
    assert not should_fold(once, 100 - once.patch_rows)
    assert should_fold(once, 101 - once.patch_rows)


def test_compact_changes_the_storage_and_nothing_else(store):
    base = build(store)
    patch = edit(store, base, report={"last_mr": 0.7, "note": "kept"})
    expected = loaded(store.snapshot(patch))[0]
    folded = store.compact(patch)
    snapshot = store.snapshot(folded, check=True)
    assert torch.equal(loaded(snapshot)[0], expected)
    assert snapshot.text == "one 2 three"
    assert (folded.version, folded.kind, folded.last_mr, folded.debt) == (2, "base", 0.7, patch.debt)
    assert store.detail(folded).report["note"] == "kept"
    assert store.previous(folded) == base
    assert store.compact(folded) == folded
    assert store.snapshot(patch).record == folded
    assert store.verify() == []
    assert store.gc(min_age_s=0).num_files == 0


def test_twins_share_a_file_and_editing_or_removing_one_leaves_the_other(store):
    one, two = build(store, doc_id="a.md"), build(store, doc_id="b.md")
    assert store.detail(one).segments == store.detail(two).segments
    assert len(list(store.path.glob("objects/*/*"))) == 1
    edited = edit(store, one)
    store.remove("/corpus", "a.md")
    assert torch.equal(loaded(store.snapshot(two, check=True))[0], cache_of(20).keys)
    with pytest.raises(UnknownDocumentError):
        store.snapshot(edited)
    assert store.verify() == []
    store.remove("/corpus", "b.md")
    assert list(store.path.glob("objects/*/*")) == []


def test_a_removed_document_is_gone_and_may_come_back(store):
    build(store)
    tombstone = store.remove("/corpus", "a.md")
    assert tombstone.kind == "tombstone"
    assert store.head("/corpus", "a.md") is None
    assert store.documents() == []
    assert store.corpora() == []
    with pytest.raises(UnknownDocumentError):
        store.remove("/corpus", "a.md")
    back = build(store, text="again")
    assert back.version == 3
    assert store.previous(back) is None
    assert store.verify() == []


def test_relink_moves_the_segments_without_writing_them(store):
    old = edit(store, build(store), report={"last_mr": 1.0})
    objects = set(store.path.glob("objects/*/*"))
    new = store.relink(old, document("one 2 three", "moved/b.md"))
    assert set(store.path.glob("objects/*/*")) == objects
    assert [record.doc_id for record in store.documents()] == ["moved/b.md"]
    assert (new.debt, new.last_mr, new.kind, new.version) == (old.debt, 1.0, "patch", 1)
    assert store.snapshot(new, check=True).text == "one 2 three"
    copy = store.relink(new, document("one 2 three", "c.md"), keep_old=True)
    assert [record.doc_id for record in store.documents()] == ["c.md", "moved/b.md"]
    assert store.verify() == []
    with pytest.raises(ValueError, match="another text"):
        store.relink(copy, document("one", "d.md"))
    with pytest.raises(StoreBusyError):
        store.relink(copy, document("one 2 three", "moved/b.md"))


def test_corpora_are_told_apart(store):
    for corpus in ("/one", "/two"):
        store.commit_base(document("x", corpus=corpus), KEY, cache_of(4), exact(4), {}, None)
    assert store.corpora() == ["/one", "/two"]
    assert [record.corpus for record in store.documents("/two")] == ["/two"]
    assert len(store.documents()) == 2


def test_models_and_gates_come_back(store):
    assert store.model(KEY.fingerprint) is None
    store.save_model(KEY)
    assert store.model(KEY.fingerprint) == KEY
    assert store.gate(KEY.fingerprint, "sdpa/cuda:0") is None
    store.save_gate(KEY.fingerprint, "sdpa/cuda:0", {"error": 1e-7})
    store.save_gate(KEY.fingerprint, "sdpa/cuda:0", {"error": np.float32(0.5)})
    store.save_gate(KEY.fingerprint, "eager", {"error": float("nan")})
    assert store.gate(KEY.fingerprint, "sdpa/cuda:0") == {"error": 0.5}
    assert store.gate(KEY.fingerprint, "eager") == {"error": None}
    assert store.gates() == [(KEY.fingerprint, "eager"), (KEY.fingerprint, "sdpa/cuda:0")]


def test_keys_and_values_may_lie_in_one_piece_of_memory(store):
    both = torch.randn(2, LAYERS, HEADS, 6, DIM)
    cache = cache_of(6)
    cache.keys, cache.values = both[0], both[1]
    record = store.commit_base(document("x"), KEY, cache, exact(6), {}, None)
    assert torch.equal(loaded(store.snapshot(record))[1], both[1])
