"""Build: what is new or changed is prefilled and stored, the rest is left alone or named."""

import pytest

from kvfix.corpus import Skipped
from kvfix.engine import Engine
from kvfix.engine.gate import deviation
from kvfix.errors import ModelMismatchError
from kvfix.pipeline import build as build_module
from kvfix.pipeline.build import build
from tests.pipeline.desk import TEXT, equal
from tests.tolerances import CACHE


def outcomes(built):
    return {one.doc_id: one.outcome for one in built}


def test_stores_what_a_prefill_gives(desk):
    (built,) = desk.build(TEXT)
    assert (built.doc_id, built.outcome, built.reason) == ("a.md", "built", None)
    assert built.record == desk.head()
    assert built.record.version == 1
    assert built.record.debt.state == "exact"
    assert built.record.num_tokens == len(desk.engine.encode(TEXT).token_ids)
    assert set(built.timing_ms) == {"prefill", "persist"}
    assert equal(desk.loaded(), desk.fresh(TEXT))


def test_unchanged_documents_are_left_alone(desk, monkeypatch):
    desk.build(TEXT, "other")
    before = desk.store.documents()
    monkeypatch.setattr(desk.engine, "prefill", lambda *args, **kwargs: pytest.fail("prefilled"))
    built = desk.build(TEXT, "other")
    assert outcomes(built) == {"a.md": "unchanged", "b.md": "unchanged"}
    assert all(one.reason and one.record for one in built)
    assert desk.store.documents() == before


def test_changed_and_new_documents_are_built(desk):
    desk.build(TEXT, "other")
    built = desk.build(TEXT, "another", "third")
    assert outcomes(built) == {"a.md": "unchanged", "b.md": "built", "c.md": "built"}
    assert [record.version for record in desk.store.documents()] == [1, 2, 1]
    assert equal(desk.loaded("b.md"), desk.fresh("another"))


def test_force_builds_unchanged_documents(desk):
    desk.build(TEXT)
    desk.edit(TEXT.replace("30", "45"), k=2, strategy="repair")
    assert desk.head().debt.state == "repaired"
    (built,) = desk.build(TEXT.replace("30", "45"), force=True)
    assert built.outcome == "built"
    assert desk.head().version == 3
    assert desk.head().debt.state == "exact"


def test_what_cannot_be_read_is_handed_on_and_the_rest_done(desk):
    documents = [Skipped("bad.md", "not UTF-8 at byte 3"), desk.document(TEXT)]
    built = list(build(desk.engine, desk.store, documents))
    assert outcomes(built) == {"bad.md": "skipped", "a.md": "built"}
    assert built[0].reason == "not UTF-8 at byte 3"


def test_a_document_too_long_is_skipped_with_both_counts(desk):
    built = desk.build("x" * 600, TEXT)
    assert outcomes(built) == {"a.md": "skipped", "b.md": "built"}
    assert "600 tokens" in built[0].reason
    assert "512" in built[0].reason
    assert desk.store.head(str(desk.corpus), "a.md") is None


def test_a_document_grown_too_long_keeps_its_cache(desk):
    desk.build(TEXT)
    before = desk.head()
    assert outcomes(desk.build("x" * 600)) == {"a.md": "skipped"}
    assert desk.head() == before


def test_an_empty_document_is_recorded_as_empty(desk):
    built = desk.build("", TEXT, "")
    assert outcomes(built) == {"a.md": "built", "b.md": "built", "c.md": "built"}
    record = desk.head()
    assert (record.num_tokens, record.debt.state, record.cache_bytes) == (0, "exact", 0)
    assert outcomes(desk.build("", TEXT, "")) == dict.fromkeys(["a.md", "b.md", "c.md"], "unchanged")


def test_nothing_to_build(desk):
    assert desk.build() == []


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2", "llama-longrope"])
def test_documents_that_share_a_pass_equal_single_builds(desk_of, name):
    desk = desk_of(name)
    texts = ["five.", "the other one " * 3, TEXT, "z" * 290, "", "a last one, a little longer than the first"]
    assert set(outcomes(desk.build(*texts)).values()) == {"built"}
    for n, text in enumerate(texts):
        if text:
            assert deviation(desk.loaded(f"{chr(97 + n)}.md"), desk.fresh(text)) <= CACHE


def test_short_documents_do_share_passes(desk, monkeypatch):
    sizes = []
    real = desk.engine.prefill_many
    monkeypatch.setattr(desk.engine, "prefill_many", lambda texts: sizes.append(len(texts)) or real(texts))
    rows = []
    built = desk.build(*["x" * 100] * 12, progress=rows.append)
    assert len(built) == 12
    assert sizes == [5, 5, 2]
    assert sum(rows) == 1200
    assert build_module.PACK_ROWS == 512


def test_the_gate_runs_once_a_store(zoo, desk_of, monkeypatch):
    runs = []
    import kvfix.engine

    real = kvfix.engine.run_gate
    monkeypatch.setattr(kvfix.engine, "run_gate", lambda engine: runs.append(engine.name) or real(engine))
    first = desk_of(Engine.open(str(zoo("llama"))))
    first.build(TEXT, "other")
    first.build("another")
    assert len(runs) == 1
    assert first.store.gates() == [(first.engine.key.fingerprint, first.engine.backend)]
    # another process: the findings come from the store
    again = Engine.open(str(zoo("llama")))
    list(build(again, first.store, [first.document("a third")]))
    assert len(runs) == 1
    assert again.rotations == first.engine.rotations


def test_a_refused_model_stores_nothing(zoo, desk_of):
    from kvfix.errors import UnsupportedModelError

    desk = desk_of(Engine.open(str(zoo("llama4-chunked"))))
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        desk.build(TEXT)
    assert desk.store.documents() == []
    assert desk.store.gates() == []


def test_another_models_document_is_refused_unless_forced(zoo, desk):
    desk.build(TEXT)
    other = Engine.open(str(zoo("qwen2")))
    with pytest.raises(ModelMismatchError, match="weights"):
        list(build(other, desk.store, [desk.document(TEXT)]))
    assert desk.head().model == desk.engine.key.fingerprint
    (built,) = build(other, desk.store, [desk.document(TEXT)], force=True)
    assert built.outcome == "built"
    assert desk.head().model == other.key.fingerprint
