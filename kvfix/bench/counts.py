"""What a pass over rows has to do at least, counted from the model and the rows' positions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kvfix.engine import Engine


class Work(NamedTuple):
    """Operations (a multiplication and an addition are two) and bytes.

    Operations are those of the matrix products and of attention; turning and normalising is a few more a number.
    """

    operations: int
    weight_bytes: int
    kv_read_bytes: int  # rows of keys and values that a query may see
    kv_written_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    def joined(self, other: Work) -> Work:
        """Of two passes, one after the other."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass
class Weights:
    """The numbers that a pass reads, of the modules that a pass over one row has called."""

    products: int = 0  # in matrices that every row is multiplied with
    vectors: int = 0  # norms and biases: read, and no operations counted
    embedded: int = 0  # in one row of each embedding table
    experts: int = 0  # in matrices of all experts
    num_experts: int = 1
    linears: list[Any] = field(default_factory=list)  # the modules that hold one matrix of `products` each

    def add(self, module: Any) -> None:
        """Count a module's own numbers; those of the modules in it are theirs."""
        size = linear_size(module)
        if size is not None:
            self.products += math.prod(size)
            self.vectors += module.bias.numel() if getattr(module, "bias", None) is not None else 0
            # layers that are multiplied as one are one matrix
            product = getattr(module, "product", module)
            if product not in self.linears:
                self.linears.append(product)
        elif hasattr(module, "embedding_dim"):
            self.embedded += module.embedding_dim
        else:
            for name, parameter in module.named_parameters(recurse=False):
                self._add_parameter(name, parameter)

    def _add_parameter(self, name: str, parameter: Any) -> None:
        if parameter.ndim == 3:
            self.experts += parameter.numel()
            self.num_experts = parameter.shape[0]
        elif parameter.ndim == 2 and "bias" not in name:
            self.products += parameter.numel()
        elif parameter.ndim == 1:
            self.vectors += parameter.numel()


def linear_size(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a module that multiplies with one matrix, by its attributes; None for any other.

    Not by its weight, which may be kept in another layout.
    """
    for names in (("in_features", "out_features"), ("nx", "nf")):
        if all(hasattr(module, name) for name in names):
            return getattr(module, names[0]), getattr(module, names[1])
    return None


@dataclass(frozen=True)
class Counts:
    """What passes of one model have to do.

    A pass reads each weight once, however many rows or documents it has; of an embedding table it reads its rows. What
    stands behind the last layer's keys and values is no part of it, the LM head included. A mixture of experts is
    assumed to spread its rows evenly: of E experts, each row taking k, E · (1 - (1 - k/E)^rows) are read.
    """

    weights: Weights
    windows: dict[int, int | None]  # of each layer that attends, as the model asks for it
    query_heads: int
    heads: int
    head_dims: int  # of a key and a value together
    num_layers: int  # that store keys and values
    item_bytes: int
    expert_share: float  # of all experts, that one row takes

    @classmethod
    def of(cls, engine: Engine) -> Counts:
        """Found by a pass over one row."""
        weights, windows = _traced(engine)
        config, shape = engine.config.get_text_config(), engine.shape
        taken = getattr(config, "num_experts_per_tok", None) or weights.num_experts
        return cls(
            weights,
            windows,
            config.num_attention_heads,
            shape.heads,
            shape.key_dim + shape.value_dim,
            shape.layers,
            engine.dtype.itemsize,
            taken / weights.num_experts,
        )

    def one_pass(self, groups: Sequence[np.ndarray]) -> Work:
        """One pass over rows of some documents, each given by its rows' positions (ascending).

        A row sees the keys at positions up to its own, as far as each layer's window reaches.
        """
        num_rows = sum(len(positions) for positions in groups)
        pairs, distinct = self._seen(groups)
        weights, row_bytes = self.weights, self.heads * self.head_dims * self.item_bytes
        products = num_rows * (weights.products + weights.experts * self.expert_share)
        read = weights.experts * (1 - (1 - self.expert_share) ** num_rows)
        numbers = weights.products + weights.vectors + num_rows * weights.embedded + read
        return Work(
            operations=round(2 * products) + 2 * self.query_heads * self.head_dims * pairs,
            weight_bytes=round(numbers * self.item_bytes) if num_rows else 0,
            kv_read_bytes=distinct * row_bytes,
            kv_written_bytes=num_rows * self.num_layers * row_bytes,
        )

    def prefill(self, num_tokens: int) -> Work:
        """All rows of a text."""
        return self.one_pass([np.arange(num_tokens)])

    def suffix(self, first: int, num_tokens: int) -> Work:
        """The rows from `first` on, behind a cached prefix."""
        return self.one_pass([np.arange(first, num_tokens)])

    def _seen(self, groups: Iterable[np.ndarray]) -> tuple[int, int]:
        """Pairs of a query and a key that it sees, and keys that any query sees, over all layers."""
        pairs = distinct = 0
        layers = Counter(self.windows.values())
        for positions in groups:
            for window, number in layers.items():
                seen, keys = seen_keys(positions, window)
                pairs, distinct = pairs + number * seen, distinct + number * keys
        return pairs, distinct


def seen_keys(positions: np.ndarray, window: int | None) -> tuple[int, int]:
    """Pairs of a query at one of the positions (ascending) and a key that it sees, and keys that any of them sees."""
    reach, steps = positions + 1, np.diff(positions, prepend=-1)
    if window is not None:
        reach, steps = np.minimum(reach, window), np.minimum(steps, window)
    return int(reach.sum()), int(steps.sum())


def _traced(engine: Engine) -> tuple[Weights, dict[int, int | None]]:
    """The modules that a pass over one row calls, counted, and the windows that its layers ask for."""
    from kvfix.engine.attention import Pass
    from kvfix.engine.cache import Rows

    cache = engine.new_cache(np.array([0]))
    this, called = Pass([Rows.at(cache, np.array([0]))]), {}

    def note(module: Any, *_: object) -> None:
        called[id(module)] = module

    hooks = [module.register_forward_hook(note) for module in engine.model.get_decoder().modules()]
    try:
        engine.run_pass(this, ends=cache.num_layers - 1)
    finally:
        for hook in hooks:
            hook.remove()
    weights = Weights()
    for module in called.values():
        weights.add(module)
    return weights, dict(this.attended)
