"""The lean start: nothing of it changes a number, and what was left out comes when it is asked for."""

import json
import subprocess
import sys

import pytest

from kvfix.engine import Engine
from tests.zoo import ZOO

LEFT_OUT = ["scipy", "torch._dynamo.convert_frame", "torch._inductor", "torch.distributed.tensor"]
TOKENS = list(range(5, 45))

LOADS = """
import gc, hashlib, json, sys
from kvfix import lean
lean.want()
lean.import_modelling()
import numpy as np
from kvfix.engine import Engine

def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()

found = {}
for folder in sys.argv[2:]:
    engine = Engine.open(folder, device="cpu", dtype="float32")
    tensors = dict(engine.model.named_parameters(remove_duplicate=False)) | dict(engine.model.named_buffers())
    cache = engine.prefill(np.array(json.loads(sys.argv[1])))
    found[folder] = {name: digest(tensor) for name, tensor in tensors.items()} | {" keys": digest(cache.keys)}
assert gc.isenabled()
print(json.dumps({"found": found, "present": list(sys.modules)}))
"""


def in_a_process(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def digest(tensor):
    import hashlib

    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def test_every_weight_buffer_and_row_is_what_it_is_otherwise(zoo):
    """Weights, buffers without a place in the file like the rotary frequencies, and the keys of a prefill, by bytes."""
    import numpy as np

    folders = {name: str(zoo(name)) for name in ZOO}
    told = json.loads(in_a_process(LOADS, json.dumps(TOKENS), *folders.values()))
    for name, folder in folders.items():
        engine = Engine.open(folder, device="cpu", dtype="float32")
        tensors = dict(engine.model.named_parameters(remove_duplicate=False)) | dict(engine.model.named_buffers())
        plain = {each: digest(tensor) for each, tensor in tensors.items()}
        plain[" keys"] = digest(engine.prefill(np.array(TOKENS)).keys)
        assert told["found"][folder] == plain, name


def test_what_no_forward_pass_uses_is_left_out(zoo):
    told = json.loads(in_a_process(LOADS, json.dumps(TOKENS), zoo("llama")))
    assert [name for name in LEFT_OUT if name in told["present"]] == []


@pytest.mark.parametrize(
    "use",
    [
        "torch._dynamo.config.suppress_errors",
        "from torch._dynamo import optimize",
        "import torch._dynamo.utils; assert torch._dynamo.utils.counters is not None",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv; ShapeEnv()",
        "assert torch.compile(lambda x: x * 2 + 1, backend='eager')(torch.ones(3)).sum() == 9",
    ],
)
def test_what_was_deferred_comes_when_it_is_used(use):
    code = f"from kvfix import lean; lean.want(); lean.import_modelling(); import torch; {use}"
    in_a_process(code)


def test_a_release_that_needs_what_is_left_out_gets_it():
    code = (
        "import sys, importlib\n"
        "from kvfix import lean\n"
        "real = importlib.import_module\n"
        "def fails(name, *more):\n"
        "    module = real(name, *more)\n"
        "    if name in lean.MODELLING: raise AttributeError('torch._dynamo has no novelty')\n"
        "    return module\n"
        "lean.importlib.import_module = fails\n"
        "lean.want(); lean.import_modelling()\n"
        "lean.importlib.import_module = real\n"
        "assert 'transformers' not in sys.modules\n"
        "from transformers.utils import is_scipy_available\n"
        "from kvfix.engine import Engine\n"
        "import torch._dynamo\n"
        "assert not isinstance(torch._dynamo, lean.Deferred)\n"
        "assert is_scipy_available() == (importlib.util.find_spec('scipy') is not None)"
    )
    in_a_process(code)


def test_a_program_that_imports_kvfix_is_left_alone():
    code = (
        "import kvfix.engine, sys; from kvfix import lean\n"
        "assert not any(isinstance(module, lean.Deferred) for module in sys.modules.values())\n"
        "from transformers.utils import is_scipy_available as asked\n"
        "assert asked.__module__ == 'transformers.utils.import_utils'"
    )
    in_a_process(code)


def test_a_model_that_will_not_be_made_lean_is_made_as_elsewhere():
    code = (
        "import torch; from kvfix import lean; lean.want(); calls = []\n"
        "def load():\n"
        "    calls.append(1)\n"
        "    with torch.device('meta'):\n"
        "        if len(calls) == 1: raise RuntimeError('no storage')\n"
        "        return torch.arange(3) + torch.ones(3)\n"
        "assert (lean.loaded(load).device.type, len(calls)) == ('meta', 2)"
    )
    in_a_process(code)
