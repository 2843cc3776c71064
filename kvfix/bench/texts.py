"""Texts of an exact number of tokens for benchmarks, edits of them, and what the results are told beside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfix.diff import diff_tokens
from kvfix.errors import UsageError
from kvfix.selectors import Budget, SelectionContext, get_selector, make_plan

if TYPE_CHECKING:
    from kvfix.core import KVCache, RepairPlan
    from kvfix.engine import Engine

# how far recomputed rows may lie from fresh ones before times are refused; see `allowed_error` for half precision
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
MOST_WORDS = 400


class Texts:
    """A text of exactly `context` tokens (prefix included), and edited ones of the same length.

    Of words that are single tokens of the model, drawn with a seed. Raises `UsageError` where the tokenizer joins them.
    """

    def __init__(self, engine: Engine, context: int, seed: int = 0) -> None:
        self.engine, self.context = engine, context
        self._rng = np.random.default_rng([context, seed])
        self._prefix = len(engine.text.prefix)
        self._chosen = self._rng.choice(self._words, context - self._prefix)
        self.text = "".join(self._chosen)
        self.token_ids = self._checked(self.text)

    @cached_property
    def _words(self) -> np.ndarray:
        return np.array(list(single_tokens(self.engine)))

    def changed(self, at: int, span: int) -> str:
        """The text with other words at tokens `[at, at + span)`, as far as these are not the prefix."""
        changed, place = self._chosen.copy(), max(0, at - self._prefix)
        for index in range(place, place + span):
            changed[index] = self._rng.choice(self._words[self._words != changed[index]])
        text = "".join(changed)
        self._checked(text)
        return text

    def _checked(self, text: str) -> np.ndarray:
        ids = self.engine.encode(text).token_ids
        if len(ids) != self.context:
            raise UsageError(f"the tokenizer makes {len(ids)} tokens of {self.context} words; bench cannot use it")
        return ids


def single_tokens(engine: Engine) -> Iterator[str]:
    """Short lower-case words that stand for one token each after a space, in the vocabulary's order."""
    found = 0
    for token in sorted(engine.text.tokenizer.get_vocab(), key=lambda t: (len(t), t)):
        word = " " + token.lstrip("Ġ▁ ")
        if token[:1] in "Ġ▁" and word[1:].isascii() and word[1:].isalpha() and word[1:].islower():
            if len(engine.text.plain_ids(word * 2)) == 2:
                found += 1
                yield word
            if found == MOST_WORDS:
                return


def plan_of(engine: Engine, old_ids: np.ndarray, new: str, k: int) -> RepairPlan:
    """What editlocal would recompute: the span and the k rows behind it."""
    encoding = engine.encode(new)
    diff = diff_tokens(old_ids, encoding.token_ids)
    context = SelectionContext(diff, Budget(k), new, encoding.offsets, encoding.num_prefix)
    return make_plan(get_selector("editlocal"), context)


def distance(one: KVCache, other: KVCache) -> float:
    """Largest difference of an entry of two caches of the same tokens; NaN if there is one."""
    if not len(one):
        return 0.0
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return float(np.max([float((mine - theirs).abs().max()) for mine, theirs in pairs]))


def allowed_error(engine: Engine, token_ids: np.ndarray, first: int) -> float:
    """How far rows recomputed from `first` on may lie from fresh ones.

    In half precision no less than twice what the model's own forward leaves open, in one pass and in two: products of
    other sizes are rounded otherwise, on a GPU more than on a CPU, and entries may be large.
    """
    least = TOLERANCE[engine.dtype_name]
    if engine.dtype_name == "float32" or first == 0:
        return least
    with engine.plain_attention():
        whole = engine.plain_forward(token_ids)
        parts = engine.plain_forward(token_ids[first:], engine.plain_forward(token_ids[:first]))
    pairs = zip(whole.layers, parts.layers, strict=True)
    noise = [max((a.keys - b.keys).abs().max(), (a.values - b.values).abs().max()) for a, b in pairs]
    return max(least, 2 * float(max(noise)))


def versions() -> dict[str, Any]:
    """What the times were taken with."""
    import platform
    from importlib.metadata import version

    import torch

    return {
        "kvfix": version("kvfix"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }
