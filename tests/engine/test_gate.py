"""Every architecture passes the gate, with each layer's rotation found as its config means it."""

import json

import numpy as np
import pytest

from kvfix.engine import Engine, rotations_from, run_gate
from kvfix.engine.gate import deviation
from tests.tolerances import CACHE, TURNED
from tests.zoo import ZOO

# rotation of each layer: dims that turn, and whether they are paired as neighbours; the zoo's heads have 16 dims
HALF, INTERLEAVED, NONE = (16, False), (16, True), (0, False)
ROTATIONS = {
    **dict.fromkeys(ZOO, [HALF] * 3),
    "phi3-partial": [(8, False)] * 3,
    "smollm3": [HALF, NONE, HALF],
    "cohere2": [INTERLEAVED, INTERLEAVED, NONE],
    "glm-interleaved": [(8, True)] * 3,
    "gpt2": None,
}
# in half precision rounding decides which experts a row goes to, so single rows of the others may differ by any amount
DENSE = ["llama", "qwen2", "gemma2", "gemma3", "smollm3", "phi3-partial", "cohere2"]
FIGURES = {
    "prefill",
    "recompute_all",
    "recompute_suffix",
    "recompute_window",
    "recompute_scattered",
    "alignment",
    "packed",
}


@pytest.mark.parametrize("name", ZOO)
def test_passes_in_fp32(gated, name):
    report = gated(name).gate_report
    assert report["dtype"] == "float32"
    assert set(report["figures"]) == FIGURES
    assert all(value <= CACHE for value in report["figures"].values()), report["figures"]
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("name", ZOO)
def test_finds_the_rotation_of_every_layer(gated, name):
    engine = gated(name)
    finding = engine.gate_report["rotation"]
    if ROTATIONS[name] is None:
        assert engine.rotations is None
        assert not engine.movable
        assert "do not simply turn" in finding["reason"]
        return
    assert engine.movable
    assert finding["key_error"] <= TURNED
    assert finding["value_error"] <= CACHE
    assert [(2 * len(layer.inv_freq), layer.interleaved) for layer in engine.rotations] == ROTATIONS[name]


@pytest.mark.parametrize("name", ["llama", "llama-linear", "qwen3", "gemma2"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rounding_alone_refuses_nothing(gated, name, seed):
    """A model taken for immovable has most of its edits re-prefilled."""
    engine = gated(name, "bfloat16", seed=seed)
    assert engine.movable
    assert {len(layer.inv_freq) for layer in engine.rotations} == {8}


def test_layers_may_have_frequencies_of_their_own(gated):
    near, also_near, far = gated("gemma3").rotations
    assert near == also_near
    assert near.inv_freq != far.inv_freq


@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn", "llama-linear"])
def test_scaled_frequencies_are_the_models_own(gated, name):
    plain = np.array(gated("llama").rotations[0].inv_freq)
    scaled = np.array(gated(name).rotations[0].inv_freq)
    assert (scaled <= plain + 1e-6).all()
    assert not np.allclose(plain, scaled)


@pytest.mark.parametrize("name", ["smollm3", "gemma3", "cohere2", "gpt2"])
def test_a_stored_finding_gives_the_same_rotations(gated, name):
    engine = gated(name)
    stored = json.loads(json.dumps(engine.gate_report["rotation"]))
    assert rotations_from(stored) == engine.rotations


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_passes_in_half_precision_within_the_measured_noise(gated, name, dtype):
    engine = gated(name, dtype)
    report = engine.gate_report
    assert report["dtype"] == dtype
    assert report["tolerance"] <= max(2.0**-6, 2 * report["noise"]["rows"])
    assert all(value <= report["tolerance"] for value in report["figures"].values())
    # the rotation found in half precision is the one that fp32 finds
    exact = gated(name)
    assert [layer.interleaved for layer in engine.rotations] == [layer.interleaved for layer in exact.rotations]
    for mine, theirs in zip(engine.rotations, exact.rotations, strict=True):
        assert mine.inv_freq == pytest.approx(theirs.inv_freq, rel=1e-2)


def test_a_model_of_few_positions_is_checked_on_less_text(zoo):
    report = run_gate(Engine.open(str(zoo("llama", max_position_embeddings=60))))
    assert 24 <= report["num_tokens"] <= 36


def test_notes_what_a_backend_needs_to_know(gated):
    report = gated("gemma2").gate_report
    assert report["attention"] == "eager"
    assert report["backend"].startswith("cpu-torch")
    assert report["shape"] == {"layers": 3, "heads": 2, "key_dim": 16, "value_dim": 16}


class TestDeviation:
    """The measure itself: a gate that cannot see NaN, or one wrong row, vouches for nothing."""

    @pytest.fixture
    def pair(self, gated):
        engine = gated("llama")
        ids = engine.text.encode("a text to compare").token_ids
        return engine.prefill(ids), engine.prefill(ids)

    def test_equal_caches(self, pair):
        assert deviation(*pair) == 0.0

    @pytest.mark.parametrize("side", [0, 1])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("tensor", ["keys", "values"])
    def test_non_finite_rows_on_either_side(self, pair, side, bad, tensor):
        getattr(pair[side], tensor)[1, 0, 3, 2] = bad
        assert not deviation(*pair) <= 1.0

    @pytest.mark.parametrize("tensor", ["keys", "values"])
    def test_one_wrong_number_in_the_last_layer(self, pair, tensor):
        getattr(pair[0], tensor)[-1, -1, -1, -1] += 0.5
        assert 0.001 < deviation(*pair) <= 0.5
        assert deviation(*pair, slice(0, len(pair[0]) - 1)) == 0.0

    def test_rows_by_number(self, pair):
        pair[0].values[0, 0, 5] += 100.0
        assert deviation(*pair, np.array([4, 6])) == 0.0
        assert deviation(*pair, np.array([4, 5])) > 1.0


def test_the_noise_of_a_model_is_measured_not_guessed(gated):
    assert gated("llama").gate_report["noise"]["rows"] < 1e-5
    assert gated("llama", "bfloat16").gate_report["noise"]["rows"] > 1e-3
    assert 0 < gated("llama").gate_report["noise"]["nats"] < 1e-3
    assert gated("llama", "bfloat16").gate_report["noise"]["nats"] > 1e-3


def test_measuring_the_noise_leaves_the_model_as_it_was(gated):
    engine = gated("llama")
    assert not engine.model.get_input_embeddings()._forward_hooks
    ids = engine.text.encode("some text").token_ids
    before = engine.prefill(ids)
    run_gate(engine)
    assert deviation(engine.prefill(ids), before) == 0.0


def test_default_attention_is_back_in_place_after_the_gate(gated):
    """What kvfix computes next must go through its own attention."""
    engine = gated("qwen3")
    assert engine.model.config._attn_implementation == "kvfix"
    with engine.plain_attention():
        assert engine.model.config._attn_implementation == "sdpa"
    assert engine.model.config._attn_implementation == "kvfix"
