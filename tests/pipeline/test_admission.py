"""A cache of another model, tokenizer, dtype or template is never used; the refusal names what differs."""

import json
import shutil

import pytest

from kvfix.core import ModelKey
from kvfix.engine import Engine
from kvfix.errors import ModelMismatchError, UnsupportedModelError
from kvfix.pipeline import admission
from kvfix.pipeline.admission import admit, mismatch, recall
from kvfix.pipeline.ask import ask
from kvfix.pipeline.build import build
from kvfix.pipeline.edit import edit
from kvfix.pipeline.plan import EditOptions
from kvfix.pipeline.verify import deep_verify
from tests.pipeline.desk import EDITS, TEXT


@pytest.fixture
def changed(zoo, tmp_path):
    """`changed(file, alter)` is a copy of the llama model with one file altered."""

    def make(name, alter):
        folder = tmp_path / "changed" / "llama"
        shutil.copytree(zoo("llama"), folder)
        path = folder / name
        content = json.loads(path.read_text())
        alter(content)
        path.write_text(json.dumps(content))
        return Engine.open(str(folder), device="cpu", dtype="float32")

    return make


def one_merge_less(tokenizer):
    tokenizer["model"]["merges"].pop()


def other_theta(config):
    config["rope_parameters"]["rope_theta"] = 20000.0


VERBS = {
    "build": lambda engine, desk: list(build(engine, desk.store, [desk.document(TEXT)])),
    "edit": lambda engine, desk: edit(engine, desk.store, desk.head(), desk.document(EDITS["growing"]), EditOptions()),
    "dry run": lambda engine, desk: edit(
        engine, desk.store, desk.head(), desk.document(EDITS["growing"]), EditOptions(dry_run=True)
    ),
    "ask": lambda engine, desk: ask(engine, desk.store, desk.head(), "Why?"),
    "verify": lambda engine, desk: list(deep_verify(engine, desk.store, [desk.head()], 1)),
}


class TestMismatch:
    @pytest.fixture
    def others(self, zoo, changed):
        """Engines that differ from the gated llama in one thing."""
        folder = str(zoo("llama"))
        return {
            "weights": lambda: Engine.open(str(zoo("llama", seed=1))),
            "tokenizer": lambda: changed("tokenizer.json", one_merge_less),
            "config": lambda: changed("config.json", other_theta),
            "dtype": lambda: Engine.open(folder, dtype="bfloat16"),
            "template": lambda: Engine.open(folder, template="{document}\nQ: {question}"),
            "prefix": lambda: Engine.open(folder, template="Read {document}\nQ: {question}"),
        }

    @pytest.mark.parametrize("what", ["weights", "tokenizer", "config", "dtype", "template", "prefix"])
    def test_names_what_differs(self, desk, others, what):
        desk.build(TEXT)
        before, engine = desk.head(), others[what]()
        with pytest.raises(ModelMismatchError) as caught:
            VERBS["edit"](engine, desk)
        assert caught.value.exit_code == 5
        message = caught.value.message
        assert message.startswith("a.md: its cache was built with llama")
        assert f"{what} (" in message
        others_named = {"weights", "tokenizer", "config", "dtype", "template", "prefix"} - {what}
        allowed = {"config": {"rope"}, "prefix": {"template"}}.get(what, set())
        assert not {name for name in others_named - allowed if f"{name} (" in message}
        assert desk.head() == before
        assert "_loaded" not in engine.__dict__, "weights were loaded to find out"

    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_refuses(self, desk, others, verb):
        desk.build(TEXT)
        before = desk.head()
        with pytest.raises(ModelMismatchError, match="tokenizer"):
            VERBS[verb](others["tokenizer"](), desk)
        assert desk.head() == before

    @pytest.mark.parametrize(
        ("what", "way_out"),
        [("dtype", "pass the --dtype"), ("template", "pass the --template"), ("weights", "--force")],
    )
    def test_says_the_way_out(self, desk, others, what, way_out):
        desk.build(TEXT)
        with pytest.raises(ModelMismatchError, match=way_out):
            VERBS["edit"](others[what](), desk)

    def test_a_forgotten_model(self):
        key = ModelKey("m", "w", "c", "", "t", "float32", "r", (), "plain")
        assert "--force" in mismatch("a.md", key, None)

    def test_the_name_decides_nothing(self, zoo, desk, tmp_path):
        folder = tmp_path / "renamed"
        shutil.copytree(zoo("llama"), folder)
        desk.build(TEXT)
        engine = Engine.open(str(folder), dtype="float32")
        assert VERBS["edit"](engine, desk).outcome in ("repaired", "reprefilled")

    def test_what_changes_no_number_decides_nothing(self, desk, changed):
        desk.build(TEXT)
        engine = changed(
            "config.json", lambda config: config.update(transformers_version="9.9", use_cache=False, _name_or_path="/x")
        )
        assert engine.key.fingerprint == desk.engine.key.fingerprint

    def test_a_chat_template_counts_by_what_stands_around_the_document(self, desk, changed):
        engine = changed("tokenizer_config.json", lambda settings: settings.update(chat_template="{{ messages }}"))
        with_template = Engine.open(str(engine.folder), template="plain")
        assert with_template.key.fingerprint == desk.engine.key.fingerprint


class TestGate:
    def test_findings_are_kept_for_the_backend_they_were_found_on(self, zoo, desk_of, monkeypatch):
        desk = desk_of(Engine.open(str(zoo("llama"))))
        report = admit(desk.engine, desk.store)
        assert desk.store.gate(desk.engine.key.fingerprint, desk.engine.backend) == report
        other = Engine.open(str(zoo("llama")))
        assert recall(other, desk.store)
        assert other.rotations == desk.engine.rotations
        elsewhere = Engine.open(str(zoo("llama")))
        monkeypatch.setattr(Engine, "backend", "cuda-torch9")
        assert not recall(elsewhere, desk.store)

    def test_again_runs_it_again(self, zoo, desk_of, monkeypatch):
        import kvfix.engine

        desk = desk_of(Engine.open(str(zoo("llama"))))
        runs, real = [], kvfix.engine.run_gate
        monkeypatch.setattr(kvfix.engine, "run_gate", lambda engine: runs.append(1) or real(engine))
        for again in (False, False, True):
            admit(desk.engine, desk.store, again=again)
        assert len(runs) == 2

    def test_a_store_that_cannot_be_written_is_no_obstacle(self, zoo, desk):
        from kvfix.store import Store

        desk.build(TEXT)
        with Store.open(desk.store.path, read_only=True) as store:
            answers = ask(Engine.open(str(zoo("llama"))), store, desk.head(), "Why?", max_new=3)
        assert len(answers) == 1

    def test_a_refusal_is_not_remembered_as_a_pass(self, zoo, desk_of, monkeypatch):
        import kvfix.engine

        desk = desk_of(Engine.open(str(zoo("llama"))))

        def refuse(engine):
            raise UnsupportedModelError("no")

        with monkeypatch.context() as patch:
            patch.setattr(kvfix.engine, "run_gate", refuse)
            with pytest.raises(UnsupportedModelError):
                desk.build(TEXT)
        assert not recall(desk.engine, desk.store)
        assert [one.outcome for one in desk.build(TEXT)] == ["built"]
        assert admission.recall(desk.engine, desk.store)

    def test_a_finding_of_absolute_positions_is_recalled_too(self, zoo, desk_of):
        desk = desk_of(Engine.open(str(zoo("gpt2"))))
        desk.build(TEXT)
        other = Engine.open(str(zoo("gpt2")))
        report = edit(other, desk.store, desk.head(), desk.document(EDITS["growing"]), EditOptions(dry_run=True))
        assert not other.movable
        assert report.plan.strategy == "suffix"
        assert "_loaded" not in other.__dict__
