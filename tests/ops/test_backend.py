"""Which implementation serves a call: asked for, it works or raises; left open, it falls back and says so once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from kvfix.errors import UsageError
from kvfix.ops import backend, positional_attention
from kvfix.ops.backend import dispatch

CPU, CUDA = torch.zeros(1), SimpleNamespace(is_cuda=True, device="cuda:0", get_device=lambda: -1)


def kernel() -> str:
    return "kernel"


def plain() -> str:
    return "plain"


def broken() -> str:
    raise RuntimeError("no compiler\nand much more")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(backend, "_failed", set())
    monkeypatch.delenv("KVFIX_OPS", raising=False)


@pytest.mark.parametrize(
    ("choice", "tensor", "taken"),
    [
        (None, CPU, "plain"),
        ("auto", CPU, "plain"),
        (None, CUDA, "kernel"),
        ("auto", CUDA, "kernel"),
        ("torch", CUDA, "plain"),
        ("triton", CUDA, "kernel"),
    ],
)
def test_who_serves(choice, tensor, taken):
    assert dispatch("op", choice, tensor, kernel, plain) == taken


@pytest.mark.parametrize(("choice", "taken"), [("torch", "plain"), ("auto", "kernel"), ("", "kernel")])
def test_the_environment_is_asked_where_the_call_leaves_it_open(monkeypatch, choice, taken):
    monkeypatch.setenv("KVFIX_OPS", choice)
    assert dispatch("op", None, CUDA, kernel, plain) == taken
    assert dispatch("op", "triton", CUDA, kernel, plain) == "kernel"


@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_kernels_run_on_the_device_of_their_tensors(monkeypatch, choice):
    """Triton launches on the current one: with a second GPU that would be another than the model's."""
    current = []

    class OnDevice:
        def __init__(self, tensor) -> None:
            self.tensor = tensor

        def __enter__(self) -> None:
            current.append(self.tensor)

        def __exit__(self, *args: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", OnDevice)
    assert dispatch("op", choice, CUDA, lambda: list(current), plain) == [CUDA]
    assert current == []


def test_an_unknown_choice_is_named(monkeypatch):
    monkeypatch.setenv("KVFIX_OPS", "cuda")
    with pytest.raises(UsageError, match=r"'cuda' \(KVFIX_OPS\): use auto, triton, torch"):
        dispatch("op", None, CPU, kernel, plain)


def test_the_automatic_choice_falls_back_and_says_so_once():
    tries = []

    def counted() -> str:
        tries.append(1)
        return broken()

    with pytest.warns(RuntimeWarning, match=r"the op kernel failed \(RuntimeError: no compiler\); PyTorch") as said:
        assert dispatch("op", None, CUDA, counted, plain) == "plain"
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch("op", None, CUDA, counted, plain) == "plain"
    assert len(tries) == 1
    # another op is another kernel
    assert dispatch("other", None, CUDA, kernel, plain) == "kernel"


def test_a_kernel_that_was_asked_for_raises():
    with pytest.raises(RuntimeError, match="no compiler"):
        dispatch("op", "triton", CUDA, broken, plain)


def test_memory_that_runs_out_is_no_fault_of_the_kernel():
    def full() -> str:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        dispatch("op", None, CUDA, full, plain)
    assert dispatch("op", None, CUDA, kernel, plain) == "kernel"


def test_without_triton_the_kernel_is_refused_and_the_automatic_choice_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UsageError, match=r"op kernel needs Triton.*pip install triton"):
        dispatch("op", "triton", CUDA, kernel, plain)

    def imports() -> str:
        import triton  # noqa: F401

        return "kernel"

    with pytest.warns(RuntimeWarning, match="import of triton halted"):
        assert dispatch("op", None, CUDA, imports, plain) == "plain"


def test_on_a_cpu_the_kernel_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    query, keys = torch.zeros(2, 1, 16), torch.zeros(2, 5, 16)
    with pytest.raises(UsageError, match=r"positional_attention kernel runs on CUDA devices.*lie on cpu"):
        positional_attention(query, keys, keys, torch.tensor([4]), scaling=1.0, backend="triton")


USES = """
import sys, torch
from kvfix.core import LayerRotation, Run
from kvfix.ops import Pack, Part, kv_deviation, packed_attention, rotate_keys, scatter_kv
keys, rows = torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 1, 16)
pack = Pack([Part(keys, keys.clone(), torch.tensor([8]), 9, torch.tensor([8]))])
scatter_kv(pack, 0, rows, rows)
packed_attention(rows[0], pack, 0, scaling=1.0)
rotate_keys(keys, [Run(0, 9, 0, 0, 3)], [LayerRotation((1.0,))])
kv_deviation([(keys[0], keys[0])])
sys.exit("triton" in sys.modules)
"""


def test_on_a_cpu_triton_is_never_imported():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", USES], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
