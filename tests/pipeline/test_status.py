"""Status: a record beside its file."""

import os

from kvfix.pipeline.status import document_status, statuses, totals
from tests.pipeline.desk import EDITS, TEXT


def state(desk, doc_id="a.md"):
    return document_status(desk.head(doc_id)).state


def test_exact_repaired_stale_missing(desk):
    desk.build(TEXT, "other")
    path = desk.corpus / "a.md"
    assert state(desk) == "exact"
    desk.edit(EDITS["growing"], k=2, strategy="repair", verify=False)
    assert state(desk) == "repaired"
    path.write_text("something else")
    assert state(desk) == "stale"
    path.unlink()
    assert state(desk) == "missing"
    assert state(desk, "b.md") == "exact"


def test_a_file_touched_is_not_stale(desk):
    desk.build(TEXT)
    os.utime(desk.corpus / "a.md", (0, 0))
    assert state(desk) == "exact"


def test_a_change_of_the_same_size_and_time_is_noticed(desk):
    desk.build(TEXT)
    path = desk.corpus / "a.md"
    stat = path.stat()
    path.write_text(EDITS["same length"])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert state(desk) == "stale"


def test_a_file_that_cannot_be_read_any_more_is_stale(desk):
    desk.build(TEXT)
    (desk.corpus / "a.md").write_bytes(b"\xff\xfe\x00")
    assert state(desk) == "stale"


def test_a_directory_in_its_place_is_missing(desk):
    desk.build(TEXT)
    (desk.corpus / "a.md").unlink()
    (desk.corpus / "a.md").mkdir()
    assert state(desk) == "missing"


def test_line_and_totals(desk):
    desk.build(TEXT, "other", "")
    desk.edit(EDITS["growing"], k=2, strategy="repair")
    (desk.corpus / "b.md").unlink()
    found = statuses(desk.store.documents())
    line = found[0].to_json()
    record = desk.head()
    assert line == {
        "doc": "a.md",
        "corpus": str(desk.corpus),
        "num_tokens": record.num_tokens,
        "state": "repaired",
        "version": 2,
        "stale_rows": record.debt.stale_rows,
        "edits_behind": 1,
        "last_mr": record.last_mr,
        "cache_bytes": record.num_tokens * record.row_bytes,
        "stored_bytes": record.stored_bytes,
    }
    assert totals(found) == {
        "documents": 3,
        "exact": 1,
        "repaired": 1,
        "stale": 0,
        "missing": 1,
        "num_tokens": sum(r.num_tokens for r in desk.store.documents()),
        "stale_rows": record.debt.stale_rows,
        "cache_bytes": sum(r.cache_bytes for r in desk.store.documents()),
        "stored_bytes": sum(r.stored_bytes for r in desk.store.documents()),
    }
    assert totals([])["documents"] == 0
