"""The gate must be able to fail: architectures it refuses by name, and models broken on purpose."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvfix.engine import Engine, attention, cache, gate, rotation, run_gate
from kvfix.engine.attention import Pass, refuse_unknown
from kvfix.engine.cache import PassCache
from kvfix.engine.refusals import refuse_by_config
from kvfix.errors import UnsupportedModelError
from kvfix.ops import Pack, packed_attention


@pytest.fixture
def opened(zoo):
    """A zoo model that no other test uses: each of these is about to be broken."""
    return lambda name, dtype="float32", **settings: Engine.open(str(zoo(name, **settings)), device="cpu", dtype=dtype)


def refusal(engine: Engine) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        run_gate(engine)
    assert caught.value.exit_code == 8
    assert engine.rotations is None
    assert engine.gate_report is None
    return caught.value.message


class TestByName:
    """What the config says is enough to refuse, before any weight is used."""

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("mamba", "linear_attention"),
            ("deepseek-mla", "latent attention"),
            ("qwen3-next-hybrid", "linear_attention"),
            ("llama4-chunked", "chunked_attention"),
        ],
    )
    def test_the_zoo(self, opened, name, reason):
        message = refusal(opened(name))
        assert message.startswith(name)
        assert reason in message

    @pytest.mark.parametrize(
        ("facts", "reason"),
        [
            ({"is_encoder_decoder": True}, "encoder-decoder"),
            ({"kv_lora_rank": 512}, "latent attention"),
            ({"layer_types": ["full_attention", "mamba"]}, "'mamba'"),
            ({"layers_block_type": ["attention", "recurrent"]}, "'recurrent'"),
            ({"state_size": 16}, "state_size"),
            ({"mamba_d_state": 16}, "mamba_d_state"),
            ({"attn_layer_period": 8}, "attn_layer_period"),
            ({"num_kv_shared_layers": 10}, "share"),
        ],
    )
    def test_what_a_config_may_say(self, facts, reason):
        config = SimpleNamespace(**facts)
        config.get_text_config = lambda: config
        with pytest.raises(UnsupportedModelError, match=reason):
            refuse_by_config(SimpleNamespace(config=config, name="m"))

    def test_plain_layer_types_are_fine(self):
        config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], num_kv_shared_layers=0)
        config.get_text_config = lambda: config
        refuse_by_config(SimpleNamespace(config=config, name="m"))

    def test_too_few_positions_to_check(self, opened):
        assert "too few" in refusal(opened("llama", max_position_embeddings=32))


class TestArguments:
    """An argument that kvfix does not know might change the scores."""

    @pytest.mark.parametrize(
        "harmless",
        [
            {"use_cache": True, "position_ids": torch.zeros(1), "is_causal": True},
            {"alibi": None},
            {"output_attentions": False},
        ],
    )
    def test_known_or_empty_ones_pass(self, harmless):
        refuse_unknown(harmless)

    @pytest.mark.parametrize("name", ["alibi", "position_bias", "chunk_size"])
    def test_others_are_named(self, name):
        with pytest.raises(UnsupportedModelError, match=name):
            refuse_unknown({name: torch.ones(1)})

    def test_attention_that_is_not_causal(self):
        with pytest.raises(UnsupportedModelError, match="is_causal=False"):
            refuse_unknown({"is_causal": False})

    def test_a_model_that_hands_on_such_an_argument_is_refused(self, opened, handed):
        handed(lambda kwargs: {**kwargs, "position_bias": torch.ones(1)})
        assert "position_bias" in refusal(opened("llama"))


@pytest.fixture
def handed(monkeypatch):
    """Change the arguments that models hand to attention."""

    def change(alter):
        real = attention.attention
        monkeypatch.setattr(
            attention, "attention", lambda module, *tensors, **kwargs: real(module, *tensors, **alter(kwargs))
        )

    yield change
    monkeypatch.undo()
    attention.register()


class TestByTrace:
    """A model that does not ask kvfix once a layer, or asks for something else than its config says."""

    @pytest.mark.parametrize(("name", "layer"), [("mistral-window", 0), ("gemma3", 0), ("gpt-oss", 0)])
    def test_a_hidden_window(self, opened, handed, name, layer):
        handed(lambda kwargs: {**kwargs, "sliding_window": None})
        message = refusal(opened(name))
        assert f"layer {layer} should see a window of 40" in message
        assert "None" in message

    def test_a_window_where_none_should_be(self, opened, handed):
        handed(lambda kwargs: {**kwargs, "sliding_window": 9})
        assert "window of None" in refusal(opened("llama"))

    def test_a_layer_that_stores_nothing(self, opened, monkeypatch):
        real = PassCache.update

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            if layer_idx == 1:
                return key_states, value_states
            return real(self, key_states, value_states, layer_idx, *args, **kwargs)

        monkeypatch.setattr(PassCache, "update", update)
        assert "2 stored keys" in refusal(opened("llama"))

    def test_a_forward_pass_that_cannot_run(self, opened, monkeypatch):
        engine = opened("llama")
        monkeypatch.setattr(engine._decoder.layers[2], "self_attn", torch.nn.Identity())
        message = refusal(engine)
        assert "cannot run its forward pass" in message
        assert "TypeError" in message

    def test_running_out_of_memory_is_no_refusal(self, opened, monkeypatch):
        def full(*args, **kwargs):
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(gate, "_compare", full)
        with pytest.raises(torch.OutOfMemoryError):
            run_gate(opened("llama"))


def attends(monkeypatch, positions=lambda own: own, **wrong):
    """Let every pass compute attention at altered positions, by wrong rules."""

    def attend(query, pack, layer, **rules):
        parts = [replace(part, positions=positions(part.positions)) for part in pack.parts]
        return packed_attention(query, Pack(parts), layer, **{**rules, **wrong})

    monkeypatch.setattr(Pass, "attend", staticmethod(attend))


def writes(monkeypatch, alter):
    """Let every pass write other keys than it computed."""
    real = cache.scatter_kv

    def scatter(pack, layer, keys, values, **how):
        real(pack, layer, alter(pack, layer, keys), values, **how)

    monkeypatch.setattr(cache, "scatter_kv", scatter)


WRONG_RULES = {
    "scaling": ("llama", {"scaling": 0.3}),
    "window forgotten": ("mistral-window", {"window": None}),
    "window too wide by one": ("mistral-window", {"window": 41}),
    "window too narrow by one": ("mistral-window", {"window": 39}),
    "window in every layer": ("gpt-oss", {"window": 40}),
    "softcap forgotten": ("gemma2", {"softcap": None}),
    "sinks forgotten": ("gpt-oss", {"sinks": None}),
}


class TestByFigures:
    """Wrong numbers: the message names the comparison that failed, its figure and what is allowed."""

    @pytest.mark.parametrize("fault", WRONG_RULES)
    def test_wrong_rules(self, opened, monkeypatch, fault):
        name, wrong = WRONG_RULES[fault]
        attends(monkeypatch, **wrong)
        message = refusal(opened(name))
        assert "fails the correctness gate" in message
        assert "prefill " in message
        assert "allowed 1.0e-04" in message

    # a softcap of 50 is less than a rounding to scores of this size
    @pytest.mark.parametrize("fault", [fault for fault in WRONG_RULES if not fault.startswith("softcap")])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_wrong_rules_in_half_precision(self, opened, monkeypatch, fault, dtype):
        name, wrong = WRONG_RULES[fault]
        attends(monkeypatch, **wrong)
        assert "prefill " in refusal(opened(name, dtype))

    def test_rows_that_see_one_key_too_few(self, opened, monkeypatch):
        attends(monkeypatch, lambda own: (own - 1).clamp(min=0))
        assert "prefill" in refusal(opened("llama"))

    def test_scattered_rows_that_see_what_they_should_not(self, opened, monkeypatch):
        """Right for every contiguous pass."""

        def seen(own):
            contiguous = int(own[-1] - own[0]) == len(own) - 1
            return own if contiguous else torch.full_like(own, int(own[-1]))

        attends(monkeypatch, seen)
        message = refusal(opened("llama"))
        assert "recompute_scattered" in message
        assert "prefill" not in message

    def test_rows_written_to_the_wrong_place(self, opened, monkeypatch):
        """Right for a whole text: only repairs are wrong."""
        writes(monkeypatch, lambda pack, layer, keys: keys if int(pack.parts[0].slots[0]) == 0 else keys.roll(1, 2))
        message = refusal(opened("llama"))
        assert "recompute_suffix" in message
        assert "prefill " not in message

    def test_texts_of_one_pass_that_see_each_other(self, opened, monkeypatch):
        """Right for every single pass."""
        real = attention.attention

        def leaky(module, query, key, value, mask, **kwargs):
            this = attention._current.get()
            out, none = real(module, query, key, value, mask, **kwargs)
            return (out + 0.01 * out.mean() if len(this.groups) > 1 else out), none

        monkeypatch.setattr(attention, "attention", leaky)
        message = refusal(opened("llama"))
        monkeypatch.undo()
        attention.register()
        assert "packed" in message
        assert "prefill " not in message

    def test_rows_that_turn_to_nan(self, opened, monkeypatch):
        def attend(*args, **rules):
            return packed_attention(*args, **rules) * torch.nan

        monkeypatch.setattr(Pass, "attend", staticmethod(attend))
        assert "nan" in refusal(opened("llama"))

    def test_a_lost_row_of_the_cache(self, opened, monkeypatch):
        """Alignment that puts every row one place too far."""
        real = gate.gather

        def shifted(cache, rows, segments, *args):
            real(cache, rows, segments, *args)
            cache.keys[:, :, :10] = cache.keys[:, :, :10].roll(1, 2)

        monkeypatch.setattr(gate, "gather", shifted)
        assert "alignment" in refusal(opened("llama"))


class TestRotation:
    """Keys whose rotation is not found may not be moved; that is no refusal, but it has to be noticed."""

    def findings(self, engine) -> dict:
        report = run_gate(engine)
        assert engine.rotations is None
        assert report["rotation"]["movable"] is False
        assert "re-prefill" in report["rotation"]["reason"]
        return report["rotation"]

    @pytest.mark.parametrize("name", ["llama", "smollm3", "cohere2"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_no_frequencies_to_try(self, opened, monkeypatch, name, dtype):
        monkeypatch.setattr(rotation, "_frequency_sets", lambda model: [])
        assert self.findings(opened(name, dtype))["key_error"] > 0.1

    @pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn", "llama-linear"])
    def test_the_plain_formula_on_scaled_frequencies(self, opened, monkeypatch, name):
        plain = 10000.0 ** -(torch.arange(8) / 8)
        monkeypatch.setattr(rotation, "_frequency_sets", lambda model: [plain])
        assert self.findings(opened(name))["key_error"] > 1e-3

    def test_one_set_where_layers_have_two(self, opened, monkeypatch):
        real = rotation._frequency_sets
        monkeypatch.setattr(rotation, "_frequency_sets", lambda model: real(model)[:1])
        self.findings(opened("gemma3"))

    def test_values_that_move(self, opened, monkeypatch):
        monkeypatch.setattr(rotation, "_value_drift", lambda here, moved, layer: 0.01 if layer == 2 else 0.0)
        assert self.findings(opened("llama"))["value_error"] == 0.01

    def test_a_layer_that_turns_otherwise_is_seen(self, opened, monkeypatch):
        """The last layer alone: a check of the first would see nothing."""

        def turned(pack, layer, keys):
            return keys + 0.01 * pack.parts[0].positions.float()[:, None] if layer == 2 else keys

        engine = opened("llama")
        ids = engine.text.encode("some text to prefill twice, here and a little further on").token_ids
        writes(monkeypatch, turned)
        rotations, finding = rotation.find_rotations(engine, ids, 0.0)
        assert rotations is None
        assert finding["key_error"] > 0.01
