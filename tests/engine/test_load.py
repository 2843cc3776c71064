"""From a model's name to weights: what is found, what is refused and why, and by what a folder is known."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfix.engine import Engine, fingerprint, locate
from kvfix.engine.load import load_config, load_model, load_tokenizer, resolve_device, resolve_dtype
from kvfix.errors import UnknownModelError, UnsupportedModelError, UsageError


@pytest.fixture
def folder(zoo, tmp_path):
    """A copy of the llama model, to be spoilt."""
    return shutil.copytree(zoo("llama"), tmp_path / "llama")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty cache folder, and no network."""
    monkeypatch.setenv("KVFIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def alter(path, **fields):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | fields))


class TestLocate:
    def test_a_folder(self, folder):
        assert locate.locate(str(folder)) == ("llama", folder.resolve())

    def test_a_relative_folder(self, folder, monkeypatch):
        monkeypatch.chdir(folder.parent)
        assert locate.locate("llama") == ("llama", folder.resolve())

    @pytest.mark.parametrize(
        "name", ["/nowhere/model", "./nothing", "~/nothing-here", "missing.gguf", "a/b/missing.gguf"]
    )
    def test_nothing_there(self, name):
        with pytest.raises(UnknownModelError, match=r"no model at|no GGUF file") as caught:
            locate.locate(name)
        assert caught.value.exit_code == 2
        assert name in caught.value.message

    def test_a_file_that_is_no_model(self, folder):
        with pytest.raises(UnknownModelError, match="neither a folder"):
            locate.locate(str(folder / "config.json"))

    def test_a_folder_without_a_config(self, folder):
        (folder / "config.json").unlink()
        with pytest.raises(UnknownModelError, match=r"config\.json is missing"):
            locate.locate(str(folder))

    def test_pickled_weights_are_not_read(self, folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(UnknownModelError, match="can run code"):
            locate.locate(str(folder))

    def test_a_hub_id_without_the_network(self, monkeypatch):
        import huggingface_hub

        asked = []

        def offline(name, **options):
            asked.append(options.get("local_files_only", False))
            raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(UnknownModelError, match="not to be had from the hub"):
            locate.locate("someone/some-model")
        assert asked[0] is True, "what is on this machine comes first"

    def test_the_demo_model_where_it_is_not_fetched(self, elsewhere, monkeypatch):
        monkeypatch.setattr(locate.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UnknownModelError, match="make demo"):
            locate.locate(None)

    def test_a_broken_gguf_file(self, elsewhere, tmp_path):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(UnknownModelError, match=r"broken\.gguf cannot be converted"):
            locate.locate(str(broken))
        assert not [path for path in (elsewhere / "models").iterdir() if path.is_dir()], "half a conversion was left"

    def test_a_conversion_is_kept_by_content(self, elsewhere, tmp_path, monkeypatch):
        runs = []

        def convert(gguf, target):
            runs.append(gguf.name)
            target.mkdir()
            (target / "config.json").write_text("{}")

        monkeypatch.setattr(locate, "_convert", convert)
        lines, one = [], tmp_path / "one.gguf"
        one.write_bytes(b"content")
        target = locate.converted(one, lines.append)
        assert (target / "config.json").is_file()
        assert locate.converted(one, lines.append) == target
        assert runs == ["one.gguf"]
        assert len(lines) == 1
        one.write_bytes(b"another content")
        assert locate.converted(one) != target
        assert len(runs) == 2


class TestLoad:
    def test_an_unknown_architecture(self, folder):
        alter(folder / "config.json", model_type="novelty")
        with pytest.raises(UnsupportedModelError, match="transformers cannot read the config") as caught:
            load_config(folder)
        assert caught.value.exit_code == 8

    def test_code_that_comes_with_a_model_is_not_run(self, folder):
        alter(
            folder / "config.json",
            model_type="novelty",
            auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        )
        (folder / "evil.py").write_text("raise SystemExit('code of a model was run')")
        with pytest.raises(UnsupportedModelError):
            Engine.open(str(folder))

    def test_no_tokenizer(self, folder):
        for path in folder.glob("tokenizer*"):
            path.unlink()
        with pytest.raises((UnknownModelError, UnsupportedModelError), match="tokenizer"):
            load_tokenizer(folder)

    def test_broken_weights(self, folder):
        (folder / "model.safetensors").write_bytes(b"\0" * 64)
        with pytest.raises(UnsupportedModelError, match="transformers cannot load the model"):
            load_model(folder, torch.float32, torch.device("cpu"))

    def test_missing_weights_are_not_made_up(self, folder):
        path = folder / "model.safetensors"
        weights = load_file(path)
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(UnsupportedModelError, match=r"lack 1 weights \(model\.layers\.1\.mlp\.up_proj"):
            load_model(folder, torch.float32, torch.device("cpu"))

    def test_weights_of_other_shapes(self, folder):
        alter(folder / "config.json", intermediate_size=128)
        with pytest.raises(UnsupportedModelError, match="cannot load"):
            load_model(folder, torch.float32, torch.device("cpu"))

    def test_tied_weights_are_not_missing(self, zoo):
        model, _ = load_model(zoo("llama", tie_word_embeddings=True), torch.float32, torch.device("cpu"))
        assert model.lm_head.weight is model.model.embed_tokens.weight

    @pytest.mark.parametrize("kind", ["mpt", "bloom"])
    def test_attention_that_is_not_the_interfaces(self, zoo, monkeypatch, tmp_path, kind):
        from tests import zoo as models

        settings = {"mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2}, "bloom": {"n_layer": 2, "n_head": 4}}
        monkeypatch.setitem(models.ZOO, kind, (kind, settings[kind]))
        with pytest.raises(UnsupportedModelError, match="does not take its attention from transformers"):
            Engine.open(str(models.save_model(tmp_path / kind, kind))).model  # noqa: B018

    @pytest.mark.parametrize("choice", ["gpu", "tpu:0", "meta", "cuda:x"])
    def test_devices(self, choice):
        with pytest.raises(UsageError, match=r"auto, cpu or cuda\[:N\]"):
            resolve_device(choice)
        assert resolve_device("cpu").type == "cpu"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
    def test_a_device_this_machine_lacks(self):
        with pytest.raises(UsageError, match="0 CUDA devices"):
            resolve_device("cuda:3")
        assert resolve_device("auto").type == "cpu"

    def test_dtypes(self, gated):
        config = gated("llama").config
        assert resolve_dtype("auto", config) == torch.float32
        config = type(config)(dtype="bfloat16")
        assert resolve_dtype("auto", config) == torch.bfloat16
        assert resolve_dtype("float16", config) == torch.float16
        with pytest.raises(UsageError, match=r"unknown dtype 'int8'.*bfloat16"):
            resolve_dtype("int8", config)

    def test_opening_loads_no_weights(self, zoo):
        engine = Engine.open(str(zoo("llama")), device="cpu")
        engine.encode("text")
        engine.describe()
        assert "_loaded" not in engine.__dict__
        assert engine.default_attention == "sdpa"
        assert "_loaded" in engine.__dict__

    def test_weights_are_ready_for_use(self, gated):
        model = gated("llama").model
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


class TestFingerprints:
    def test_a_file_is_hashed_once(self, folder, elsewhere, monkeypatch):
        path = folder / "model.safetensors"
        digest = fingerprint.file_digest(path)
        monkeypatch.setattr(fingerprint, "_sha256", lambda file: pytest.fail("hashed again"))
        assert fingerprint.file_digest(path) == digest

    @pytest.mark.parametrize("how", ["another time", "another size", "another file in its place"])
    def test_a_changed_file_is_hashed_again(self, folder, elsewhere, how):
        path = folder / "model.safetensors"
        digest, stat, content = fingerprint.file_digest(path), path.stat(), bytearray(path.read_bytes())
        content[-1] ^= 1
        if how == "another size":
            content.append(0)
        if how == "another file in its place":
            (folder / "new").write_bytes(content)
            os.replace(folder / "new", path)
        else:
            path.write_bytes(content)
        later = stat.st_mtime_ns + (1 if how == "another time" else 0)
        os.utime(path, ns=(stat.st_atime_ns, later))
        assert fingerprint.file_digest(path) != digest

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}'])
    def test_a_damaged_memory_costs_a_hash_only(self, folder, elsewhere, content):
        elsewhere.mkdir()
        (elsewhere / "fingerprints.json").write_text(content)
        assert len(fingerprint.file_digest(folder / "model.safetensors")) == 64

    def test_a_memory_that_cannot_be_written(self, folder, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KVFIX_CACHE", str(tmp_path / "file" / "below"))
        assert len(fingerprint.file_digest(folder / "model.safetensors")) == 64

    def test_all_weight_files_count_by_name(self, folder, elsewhere):
        before = fingerprint.weights_digest(folder)
        shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
        more = fingerprint.weights_digest(folder)
        (folder / "more.safetensors").rename(folder / "other.safetensors")
        assert len({before, more, fingerprint.weights_digest(folder)}) == 3

    def test_an_adapter_counts(self, folder, elsewhere):
        assert fingerprint.adapter_digest(folder) == ""
        (folder / "adapter_config.json").write_text('{"r": 8}')
        one = fingerprint.adapter_digest(folder)
        (folder / "adapter_config.json").write_text('{"r": 16}')
        assert len({"", one, fingerprint.adapter_digest(folder)}) == 3

    def test_rope_is_readable(self, zoo):
        assert json.loads(fingerprint.rope_text(zoo("llama-yarn")))["rope_parameters"]["rope_type"] == "yarn"
