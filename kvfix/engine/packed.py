"""Linear layers with their weights in the layout that oneDNN's matrix products read fastest.

A repair has some tens of rows. With the weights as they are stored, `torch.nn.functional.linear` multiplies them at
half the arithmetic rate of a long prefill; with weights laid out in blocks beforehand, at nearly that of a long one.
The dense weights are let go, so that a model takes no more memory than before.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch

from kvfix import pages
from kvfix.pages import MappedFiles


class PackedLinear(torch.nn.Module):
    """What `torch.nn.Linear` computes, up to rounding."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # an opaque tensor, which has no strides and is no parameter
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.dense = False

    @property
    def weight(self) -> torch.Tensor:
        """The dense weights `[out, in]`, bit for bit, in new memory."""
        return self.packed.to_dense()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in]` → `[..., out]`."""
        if self.dense:
            return torch.nn.functional.linear(rows, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights on this device in this dtype are packed; half precision takes a processor that knows it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return dtype == torch.float32 or (hasattr(ops, str(asked)) and getattr(ops, str(asked))())


def pack_weights(model: torch.nn.Module) -> None:
    """Replace the linear layers of a model in place, but for the one that makes logits.

    That one shares its weights with the embeddings in many models, and few rows pass through it.
    """
    kept = model.get_output_embeddings()  # type: ignore[operator]
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if _is_packable(child) and child is not kept
    ]
    # a layer may stand in several places
    layers = list(dict.fromkeys(child for _, _, child in places))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        packed = dict(zip(layers, pool.map(partial(_packed, files=MappedFiles()), layers), strict=True))
    for parent, name, child in places:
        setattr(parent, name, packed[child])


def _is_packable(module: torch.nn.Module | None) -> TypeGuard[torch.nn.Linear]:
    """Whether it is a linear layer with weights to pack; a class of its own may do more than multiply."""
    return (
        type(module) is torch.nn.Linear
        and module.weight.numel() > 0
        and packs(module.weight.device, module.weight.dtype)
    )


def _packed(linear: torch.nn.Linear, files: MappedFiles) -> PackedLinear:
    """A layer packed, its dense weights let go."""
    made = PackedLinear(linear)
    if files.hold(linear.weight):
        pages.forget(linear.weight)
    linear.weight = None  # type: ignore[assignment]
    return made


@contextmanager
def dense_weights(model: torch.nn.Module) -> Iterator[None]:
    """For comparisons: the products as the model's own layers make them."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for module in packed:
        module.dense = True
    try:
        yield
    finally:
        for module in packed:
            module.dense = False
