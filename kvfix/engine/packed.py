"""Linear layers with their weights in the layout that oneDNN's matrix products read fastest.

A repair has some tens of rows. With the weights as they are stored, `torch.nn.functional.linear` multiplies them at
half the arithmetic rate of a long prefill; with weights laid out in blocks beforehand, at nearly that of a long one.
Queries, keys and values are one product, as are the two before a gate. The dense weights are let go, so that a model
takes no more memory than before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch

from kvfix import pages
from kvfix.pages import MappedFiles

# layers of one module that multiply the same rows, as models name them
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product:
    """The matrix product of linear layers that multiply the same rows, `[..., in]` → `[..., out of all]`."""

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.sizes = [layer.out_features for layer in layers]
        self.in_features, self.out_features = layers[0].in_features, sum(self.sizes)
        # an opaque tensor, which has no strides and is no parameter
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights) if weights[1:] else weights[0])
        self.bias = torch.cat(biases) if biases else None
        self._rows: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")

    def part(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        """What one of the layers gives; the others' outputs are kept until the last has been asked for."""
        if len(self.sizes) == 1:
            return self(rows)
        if self._rows is not rows:
            self._rows, self._outputs = rows, self(rows).split(self.sizes, -1)
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._rows, self._outputs = None, ()
        return output


class PackedLinear(torch.nn.Module):
    """What a `torch.nn.Linear` computes, up to rounding, as its part of a product."""

    def __init__(self, product: Product, number: int = 0) -> None:
        super().__init__()
        self.product, self.number, self.dense = product, number, False
        self.in_features, self.out_features = product.in_features, product.sizes[number]

    @classmethod
    def of(cls, *layers: torch.nn.Linear) -> list[PackedLinear]:
        """Layers that multiply the same rows."""
        product = Product(layers)
        return [cls(product, number) for number in range(len(layers))]

    @property
    def _own(self) -> slice:
        start = sum(self.product.sizes[: self.number])
        return slice(start, start + self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The dense weights `[out, in]`, bit for bit, in new memory."""
        return self.product.packed.to_dense()[self._own]

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out]`."""
        return None if self.product.bias is None else self.product.bias[self._own]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in]` → `[..., out]`."""
        if self.dense:
            return torch.nn.functional.linear(rows, self.weight, self.bias)
        return self.product.part(rows, self.number)

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
    places: dict[torch.nn.Linear, list[tuple[torch.nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if _is_packable(child) and child is not kept:
                places.setdefault(child, []).append((parent, name))
    groups = list(_groups(places))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        made = pool.map(partial(_packed, files=MappedFiles()), groups)
        for group, packed in zip(groups, made, strict=True):
            for layer, replacement in zip(group, packed, strict=True):
                for parent, name in places[layer]:
                    setattr(parent, name, replacement)


def _is_packable(module: torch.nn.Module | None) -> TypeGuard[torch.nn.Linear]:
    """Whether it is a linear layer with weights to pack; a class of its own may do more than multiply."""
    if type(module) is not torch.nn.Linear or not module.weight.numel():
        return False
    return packs(module.weight.device, module.weight.dtype)


def _groups(places: dict[torch.nn.Linear, list[tuple[torch.nn.Module, str]]]) -> Iterator[tuple[torch.nn.Linear, ...]]:
    """The layers, those together whose products are one; what stands in several places stays alone."""
    at = {where[0]: layer for layer, where in places.items() if len(where) == 1}
    done: set[torch.nn.Linear] = set()
    for layer, where in places.items():
        parent, name = where[0]
        names = next((names for names in JOINED if name in names), (name,))
        found = [at[parent, each] for each in names if (parent, each) in at]
        group = tuple(found) if len(found) == len(names) and _agree(found) else (layer,)
        if not done.intersection(group):
            done.update(group)
            yield group


def _agree(layers: Sequence[torch.nn.Linear]) -> bool:
    return len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) == 1


def _packed(layers: Sequence[torch.nn.Linear], files: MappedFiles) -> list[PackedLinear]:
    """Layers packed, their dense weights let go."""
    made = PackedLinear.of(*layers)
    for layer in layers:
        if files.hold(layer.weight):
            pages.forget(layer.weight)
        layer.weight = None  # type: ignore[assignment]
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
