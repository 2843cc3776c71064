"""Packed weights: the products of the layers that they replace, and nothing of the model lost."""

import warnings

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
    mine, theirs = PackedLinear(layer)(rows), layer(rows)
    assert mine.shape == theirs.shape
    assert mine.dtype == dtype
    torch.testing.assert_close(mine, theirs, rtol=ATTENTION[dtype], atol=ATTENTION[dtype])


def test_rows_need_not_lie_side_by_side():
    layer = linear()
    rows = torch.randn(63, 40).t()[::2]
    torch.testing.assert_close(PackedLinear(layer)(rows), layer(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_the_weights_is_lost(dtype):
    layer = linear(dtype=dtype)
    assert torch.equal(PackedLinear(layer).weight, layer.weight)


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


def test_dense_products_on_demand():
    layer, rows = linear(), torch.randn(35, 63)
    packed = PackedLinear(layer)
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
