"""Which implementation serves a call: an op's Triton kernel, or its PyTorch code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from kvfix.errors import UsageError, first_line

Result = TypeVar("Result")

BACKENDS = ("auto", "triton", "torch")

_failed: set[str] = set()  # ops whose kernel has failed in this process under the automatic choice


def dispatch(
    op: str,
    backend: str | None,
    tensor: torch.Tensor,
    kernel: Callable[[], Result],
    plain: Callable[[], Result],
) -> Result:
    """The result of `kernel` or of `plain`, for a call on `tensor`'s device.

    `auto` takes the kernel for CUDA tensors and, where it fails, PyTorch from then on, with one `RuntimeWarning` an op.
    `triton` works or raises: `UsageError` where Triton is missing or the tensors lie where it cannot run. None asks the
    environment variable KVFIX_OPS, whose default is `auto`.
    """
    choice = backend or os.environ.get("KVFIX_OPS") or "auto"
    if choice not in BACKENDS:
        raise UsageError(f"unknown ops backend {choice!r} (KVFIX_OPS): use {', '.join(BACKENDS)}")
    if choice == "torch" or (choice == "auto" and (not tensor.is_cuda or op in _failed)):
        return plain()
    if choice == "triton":
        _require_triton(op, tensor)
        return _beside(tensor, kernel)
    try:
        return _beside(tensor, kernel)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a driver raises
        _failed.add(op)
        warnings.warn(
            f"the {op} kernel failed ({type(error).__name__}: {first_line(error)}); PyTorch takes its place, "
            "more slowly. KVFIX_OPS=torch says so from the start",
            RuntimeWarning,
            stacklevel=3,
        )
        return plain()


def _beside(tensor: torch.Tensor, kernel: Callable[[], Result]) -> Result:
    """Triton launches on the current device, wherever the tensors lie."""
    with torch.cuda.device_of(tensor):
        return kernel()


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU; it has to be told so before it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _require_triton(op: str, tensor: torch.Tensor) -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the {op} kernel needs Triton, which is not here ({first_line(error)}): "
            "pip install triton, or leave KVFIX_OPS at auto"
        ) from error
    if not (tensor.is_cuda or interpreted()):
        raise UsageError(
            f"the {op} kernel runs on CUDA devices, and these tensors lie on {tensor.device}: use KVFIX_OPS=auto "
            "(or, to try kernels on a CPU, start with TRITON_INTERPRET=1)"
        )
