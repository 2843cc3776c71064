"""The Python API: everything the command line does, for programs."""

import os
import subprocess
import sys

import pytest
import torch

import kvfix
from kvfix import EditOptions, KVFix
from kvfix.engine.gate import deviation
from kvfix.errors import DocumentError, StoreMissingError, UnknownDocumentError, UnknownModelError, UsageError
from kvfix.pipeline.sync import SyncOptions
from tests.tolerances import CACHE

TEXT = "The fee is 30 crowns a week.\n\nIt is due on Friday, at the harbour office.\n\n" + "Pay in coins. " * 10
NEW = TEXT.replace("30", "45 or more")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "fees.md").write_text(TEXT)
    (folder / "sub" / "berths.md").write_text("Berth 4 is free.")
    (folder / "empty.md").write_text("")
    (folder / "data.bin").write_bytes(b"\0")
    return folder


@pytest.fixture
def kv(zoo, tmp_path):
    with KVFix.open(tmp_path / "store", str(zoo("llama")), device="cpu", dtype="float32") as opened:
        yield opened


@pytest.fixture
def built(kv, corpus):
    assert {b.doc_id: b.outcome for b in kv.build(corpus)} == dict.fromkeys(
        ["empty.md", "fees.md", "sub/berths.md"], "built"
    )
    return kv


def test_build_repair_load(built, corpus):
    (corpus / "fees.md").write_text(NEW)
    report = built.repair(corpus / "fees.md", EditOptions(k=6, strategy="repair"))
    assert report.outcome == "repaired"
    assert built.record("fees.md").version == 2
    cache = built.load("fees.md", room=7)
    assert cache.capacity == len(cache) + 7
    end = built.record("fees.md").debt.exact_until
    assert deviation(cache, built.engine.prefill(cache.token_ids), slice(0, end)) <= CACHE


def test_a_text_from_elsewhere(built):
    assert built.repair("fees.md", EditOptions(k=6), NEW).outcome in ("repaired", "reprefilled")
    assert built.store.snapshot(built.record("fees.md")).text == NEW
    assert built.repair("fees.md", text=NEW.encode()).outcome == "unchanged"
    with pytest.raises(DocumentError, match="not UTF-8 at byte 0"):
        built.repair("fees.md", text=b"\xff")


def test_diff_and_plan_load_no_weights(built, zoo, tmp_path):
    with KVFix.open(tmp_path / "store", str(zoo("llama")), device="cpu", dtype="float32") as other:
        change = other.diff("fees.md", NEW)
        assert [(span["old_text"], span["new_text"]) for span in change.spans()] == [("30", "45 or more")]
        plan = other.plan("fees.md", EditOptions(k=6, strategy="repair"), NEW)
        assert plan.outcome == "planned"
        assert len(plan.plan.positions) == change.diff.num_span + 6
        assert "_loaded" not in other.engine.__dict__
        assert other.record("fees.md").version == 1


def test_plan_keeps_the_options_it_was_given(built):
    options = EditOptions(k=3, strategy="repair")
    assert len(built.plan("fees.md", options, NEW).plan.positions) == len("45 or more") + 3
    assert options.dry_run is False


def test_a_loaded_cache_is_a_fresh_copy(built):
    one, other = built.load("fees.md"), built.load("fees.md")
    one.keys.zero_()
    assert other.keys.abs().max() > 0
    assert built.store.verify() == []
    assert deviation(built.load("fees.md"), other) == 0.0


def test_a_cache_for_transformers_own_generate(built, zoo):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(zoo("llama"), dtype=torch.float32)
    ids, cache = built.load_for_generate("fees.md")
    assert ids.shape == (1, built.record("fees.md").num_tokens)
    query = torch.tensor([built.engine.text.question_ids("When?")])
    whole = torch.cat([ids, query], 1)
    with torch.inference_mode():
        out = model.generate(
            whole, attention_mask=torch.ones_like(whole), past_key_values=cache, max_new_tokens=10, do_sample=False
        )
        plain = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=10, do_sample=False)
    assert torch.equal(out, plain)
    mine = built.engine.generate(built.load("fees.md"), [query[0].tolist()], 10)[0]
    assert out[0, whole.shape[1] :].tolist()[: len(mine)] == mine
    again, second = built.load_for_generate("fees.md")
    assert second.get_seq_length() == again.shape[1] < cache.get_seq_length()


def test_ask(built):
    (answer,) = built.ask("fees.md", "When?", max_new=5)
    assert answer.source == "current"
    built.repair("fees.md", EditOptions(k=6, strategy="repair"), NEW)
    assert [a.source for a in built.ask("fees.md", "When?", compare=True, max_new=5)] == [
        "previous",
        "current",
        "fresh",
    ]


def test_status(built, corpus):
    assert {s.record.doc_id: s.state for s in built.status()} == dict.fromkeys(
        ["empty.md", "fees.md", "sub/berths.md"], "exact"
    )
    (corpus / "fees.md").write_text(NEW)
    assert [s.state for s in built.status(corpus / "fees.md")] == ["stale"]
    assert [s.record.doc_id for s in built.status(corpus / "sub")] == ["sub/berths.md"]


def test_sync_and_refresh(built, corpus):
    # an insertion: there is no old answer that this model could prefer
    (corpus / "fees.md").write_text(TEXT.replace("30 crowns", "30 silver crowns"))
    (corpus / "sub" / "berths.md").rename(corpus / "berths.md")
    options = SyncOptions(edit=EditOptions(k=0, strategy="repair"), verify_sample=0.0)
    done = {each.doc_id: each for each in built.sync(corpus, options=options)}
    assert {name: each.outcome for name, each in done.items()} == {
        "berths.md": "relinked",
        "empty.md": "unchanged",
        "fees.md": "repaired",
    }
    assert done["fees.md"].report.quality.num_skipped == 0
    (again,) = built.refresh()
    assert (again.before.doc_id, again.outcome, again.record.stale_rows) == ("fees.md", "reprefilled", 0)
    assert list(built.refresh(corpus)) == []
    assert {each.outcome for each in built.sync(corpus)} == {"unchanged"}
    with pytest.raises(UsageError, match="the store knows 3 of its documents"):
        built.sync(corpus, include=["*.rst"])


class TestNames:
    def test_by_path_or_id(self, built, corpus, monkeypatch):
        for name in ("fees.md", str(corpus / "fees.md"), corpus / "fees.md"):
            assert built.record(name).doc_id == "fees.md"
        monkeypatch.chdir(corpus / "sub")
        assert built.record("berths.md").doc_id == "sub/berths.md"

    @pytest.mark.parametrize("name", ["nothing.md", "fee.md", "/elsewhere/fees.md"])
    def test_unknown_ones(self, built, name):
        with pytest.raises(UnknownDocumentError):
            built.record(name)

    def test_removed_ones(self, built, corpus):
        built.store.remove(str(corpus), "fees.md")
        with pytest.raises(UnknownDocumentError):
            built.load("fees.md")


class TestFaults:
    def test_no_such_model(self, tmp_path):
        with KVFix.open(tmp_path / "store", str(tmp_path / "nothing")) as kv, pytest.raises(UnknownModelError):
            kv.engine  # noqa: B018

    def test_no_such_store(self, tmp_path):
        with pytest.raises(StoreMissingError):
            KVFix.open(tmp_path / "store", create=False)
        with pytest.raises(StoreMissingError):
            KVFix.open(tmp_path / "store", read_only=True)

    def test_an_empty_document_has_no_cache(self, built):
        for load in (built.load, built.load_for_generate):
            with pytest.raises(UsageError, match=r"empty\.md is empty"):
                load("empty.md")

    def test_a_file_that_has_gone(self, built, corpus):
        (corpus / "fees.md").unlink()
        with pytest.raises(DocumentError, match=r"fees\.md"):
            built.repair("fees.md")
        assert built.record("fees.md").version == 1


class TestPackage:
    def test_at_most_fifteen_names_all_there(self):
        assert len(kvfix.__all__) <= 15
        assert sorted(kvfix.__all__) == kvfix.__all__
        for name in kvfix.__all__:
            assert getattr(kvfix, name).__name__ == name

    def test_unknown_names(self):
        with pytest.raises(AttributeError, match="nothing"):
            kvfix.nothing  # noqa: B018

    def test_importing_it_is_light(self):
        code = "import kvfix, sys; sys.exit(bool({'torch', 'transformers', 'numpy', 'sqlalchemy'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
