"""Deep verify: a cache beside a fresh prefill of its text."""

import pytest

from kvfix import debt
from kvfix.pipeline.verify import deep_verify
from tests.pipeline.desk import EDITS, TEXT


def checks(desk, sample=10, seed=0):
    return list(deep_verify(desk.engine, desk.store, desk.store.documents(), sample, seed))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_what_was_built_is_exact(desk_of, name):
    desk = desk_of(name)
    desk.build(TEXT, "another")
    for check in checks(desk):
        assert check.ok
        assert check.error_exact <= 1e-4
        assert check.error_stale is None
        assert check.exact_rows == desk.head(check.doc_id).num_tokens


def test_stale_rows_are_reported_and_not_judged(desk):
    desk.build(TEXT)
    desk.edit(EDITS["growing"], k=2, strategy="repair", verify=False)
    (check,) = checks(desk)
    assert check.ok
    assert check.exact_rows == desk.head().debt.exact_until
    assert check.error_stale > 1e-3
    assert check.to_json() == {
        "doc_id": "a.md",
        "exact_rows": check.exact_rows,
        "error_exact": check.error_exact,
        "error_stale": check.error_stale,
        "tolerance": 1e-3,
        "ok": True,
    }


def test_a_document_edited_at_its_first_token(desk):
    desk.build(TEXT)
    desk.edit(EDITS["first token"], k=0, strategy="repair", verify=False)
    (check,) = checks(desk)
    assert check.ok
    assert check.exact_rows <= 1


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-3), ("bfloat16", 0.6)])
def test_what_rounding_may_do_is_allowed(desk_of, monkeypatch, dtype, allowed):
    """In half precision a row may go to other experts; the gate has measured how much that changes."""
    desk = desk_of("llama", dtype=dtype)
    desk.build(TEXT)
    noise = {"rows": 0.3, "nats": 0.0}
    monkeypatch.setattr(desk.engine, "gate_report", {**desk.engine.gate_report, "noise": noise})
    assert checks(desk)[0].tolerance == allowed


@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_wrong_cache_is_found(desk, tensor, layer):
    """Its bytes are as they were written; they were wrong when they were."""
    document = desk.document(TEXT)
    cache = desk.fresh(TEXT)
    getattr(cache, tensor)[layer, 1, 100] += 0.1
    desk.store.commit_base(document, desk.engine.key, cache, debt.fresh(len(cache)), {}, None)
    assert desk.store.verify() == []
    (check,) = checks(desk)
    assert not check.ok
    assert check.to_json()["ok"] is False
    assert check.error_exact > check.tolerance


def test_rows_that_were_moved_and_never_turned_are_found(desk):
    """A cache that claims its keys were computed where they stand."""
    document = desk.document("!" + TEXT)
    cache, stale = desk.fresh("!" + TEXT), desk.fresh(TEXT)
    cache.keys[:, :, 1 : len(cache)] = stale.keys[:, :, : len(stale)]
    desk.store.commit_base(document, desk.engine.key, cache, debt.fresh(len(cache)), {}, None)
    assert not checks(desk)[0].ok


def test_a_debt_that_promises_too_much_is_found(desk):
    desk.build(TEXT)
    cache, record = desk.loaded(), desk.head()
    cache.keys[:, :, 200:] = 0
    desk.store.commit_base(desk.document(TEXT), desk.engine.key, cache, debt.fresh(len(cache)), {}, record)
    assert not checks(desk)[0].ok


def test_a_sample_is_seeded_and_in_order(desk):
    desk.build(*["text " + chr(97 + n) for n in range(8)])
    names = [check.doc_id for check in checks(desk, 3, seed=1)]
    assert len(names) == 3
    assert names == sorted(names) == [check.doc_id for check in checks(desk, 3, seed=1)]
    assert names != [check.doc_id for check in checks(desk, 3, seed=2)]
    assert len(checks(desk, 100)) == 8


def test_empty_documents_have_nothing_to_check(desk):
    desk.build("", TEXT)
    assert [check.doc_id for check in checks(desk)] == ["b.md"]
