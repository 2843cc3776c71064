"""Packed weights: the products of the layers that they replace, and nothing of the model lost."""

import warnings
import weakref

import pytest
import torch

from kvfix.engine import Engine, run_gate
from kvfix.engine import packed as packed_module
from kvfix.engine.packed import PackedLinear, dense_weights, pack_weights, packs
from kvfix.errors import UnsupportedModelError
from tests.tolerances import ATTENTION, CACHE

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if packs(CPU, dtype)]

pytestmark = pytest.mark.skipif(not packs(CPU, torch.float32), reason="this build of PyTorch has no oneDNN")


def linear(inner=63, outer=111, bias=True, dtype=torch.float32):
    torch.manual_seed(inner)
    return torch.nn.Linear(inner, outer, bias=bias).to(dtype).requires_grad_(False)


def single(layer):
    (packed,) = PackedLinear.of(layer)
    return packed


class Tiny(torch.nn.Module):
    """A model with what may stand in one: a layer in two places, a class of its own, an empty layer, logits."""

    class Scaled(torch.nn.Linear):
        def forward(self, rows):
            return 2 * super().forward(rows)

    def __init__(self):
        super().__init__()
        self.one = self.again = linear(8, 8)
        self.scaled = Tiny.Scaled(8, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nothing = torch.nn.Linear(8, 0)
        self.deeper = torch.nn.ModuleDict({"empty": nothing, "two": linear(8, 6, bias=False)})
        self.lm_head = linear(8, 20)

    def get_output_embeddings(self):
        return self.lm_head


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 63), (35, 63), (1, 7, 63), (2, 3, 63), (0, 63)])
def test_multiplies_as_the_layer_does(dtype, bias, shape):
    layer = linear(bias=bias, dtype=dtype)
    rows = torch.randn(shape, dtype=dtype)
    mine, theirs = single(layer)(rows), layer(rows)
    assert mine.shape == theirs.shape
    assert mine.dtype == dtype
    torch.testing.assert_close(mine, theirs, rtol=ATTENTION[dtype], atol=ATTENTION[dtype])


def test_rows_need_not_lie_side_by_side():
    layer = linear()
    rows = torch.randn(63, 40).t()[::2]
    torch.testing.assert_close(single(layer)(rows), layer(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_the_weights_is_lost(dtype):
    layer = linear(dtype=dtype)
    assert torch.equal(single(layer).weight, layer.weight)


def test_replaces_plain_layers_alone():
    model = Tiny()
    pack_weights(model)
    assert isinstance(model.one, PackedLinear)
    assert model.again is model.one
    assert isinstance(model.deeper["two"], PackedLinear)
    assert type(model.scaled) is Tiny.Scaled
    assert type(model.deeper["empty"]) is torch.nn.Linear
    assert type(model.lm_head) is torch.nn.Linear


def test_the_dense_weights_are_let_go():
    model = Tiny()
    layer = model.one
    pack_weights(model)
    assert layer.weight is None
    assert "one.weight" not in dict(model.named_parameters())


def test_elsewhere_the_layers_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = Tiny()
    pack_weights(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert not packs(torch.device("cuda"), torch.float32)
    assert not packs(CPU, torch.float64)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "mixtral"])
def test_models_are_loaded_with_packed_weights(gated, name):
    engine = gated(name)
    linears = [m for m in engine.model.modules() if isinstance(m, PackedLinear)]
    assert len(linears) >= 4 * engine.shape.layers
    assert "packed" in engine.backend
    assert engine.gate_report["figures"]["prefill"] <= CACHE


class TestJoined:
    """Layers over the same rows, as one product."""

    LAYERS = (("q_proj", 11, True), ("k_proj", 5, True), ("v_proj", 7, True))

    def layers(self, *changed):
        made = [linear(63, outer, bias) for _, outer, bias in self.LAYERS]
        for number, layer in changed:
            made[number] = layer
        parent = torch.nn.ModuleDict({name: layer for (name, *_), layer in zip(self.LAYERS, made, strict=True)})
        parent.get_output_embeddings = lambda: None
        return parent, made

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0), (0,)])
    def test_each_gives_its_own_whatever_is_asked_first(self, order):
        _, layers = self.layers()
        packed = PackedLinear.of(*layers)
        for rows in (torch.randn(1, 9, 63), torch.randn(1, 4, 63)):
            for number in order:
                torch.testing.assert_close(packed[number](rows), layers[number](rows), rtol=1e-5, atol=1e-5)

    def test_they_are_multiplied_once(self, monkeypatch):
        parent, _ = self.layers()
        pack_weights(parent)
        calls, real = [], packed_module.Product.__call__
        monkeypatch.setattr(packed_module.Product, "__call__", lambda self, rows: calls.append(1) or real(self, rows))
        rows = torch.randn(3, 63)
        outputs = [parent[name](rows) for name, *_ in self.LAYERS]
        assert [out.shape[-1] for out in outputs] == [11, 5, 7]
        assert len(calls) == 1
        assert len({id(module.product) for module in parent.values()}) == 1

    def test_nothing_is_held_afterwards(self):
        _, layers = self.layers()
        packed = PackedLinear.of(*layers)
        rows = torch.randn(3, 63)
        gone = weakref.ref(rows)
        for each in packed:
            each(rows)
        del rows
        assert gone() is None

    def test_weights_and_biases_are_each_ones_own(self):
        _, layers = self.layers()
        for mine, theirs in zip(PackedLinear.of(*layers), layers, strict=True):
            assert torch.equal(mine.weight, theirs.weight)
            assert torch.equal(mine.bias, theirs.bias)

    @pytest.mark.parametrize("other", [linear(63, 5, False), linear(62, 5), Tiny.Scaled(63, 5)])
    def test_those_that_differ_stay_apart(self, other):
        parent, _ = self.layers((1, other))
        pack_weights(parent)
        assert parent["q_proj"].product is not parent["v_proj"].product

    def test_one_that_stands_in_two_places_stays_alone(self):
        shared = linear(63, 7)
        parent, _ = self.layers((1, shared), (2, shared))
        pack_weights(parent)
        assert parent["k_proj"] is parent["v_proj"]
        assert parent["k_proj"].product.sizes == [7]

    def test_models_have_them(self, gated):
        layer = gated("llama").model.model.layers[0]
        assert layer.self_attn.q_proj.product is layer.self_attn.v_proj.product
        assert layer.mlp.gate_proj.product is layer.mlp.up_proj.product
        assert layer.self_attn.o_proj.product.sizes == [layer.self_attn.o_proj.out_features]


def test_dense_products_on_demand():
    layer, rows = linear(), torch.randn(35, 63)
    packed = single(layer)
    with dense_weights(torch.nn.Sequential(packed)):
        assert torch.equal(packed(rows), layer(rows))
    assert not packed.dense


def test_the_gate_refuses_products_that_are_wrong(zoo, monkeypatch):
    real = PackedLinear.forward

    def wrong(self, rows):
        out = real(self, rows)
        return out if self.dense else out * 1.01

    monkeypatch.setattr(packed_module.PackedLinear, "forward", wrong)
    with pytest.raises(UnsupportedModelError, match="prefill"):
        run_gate(Engine.open(str(zoo("llama")), device="cpu", dtype="float32"))
