"""One question put to several caches at once: margin, distributions and greedy continuation of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvfix import metrics
from kvfix.core import KVCache
from kvfix.pipeline.arms import MAX_NEW

if TYPE_CHECKING:
    import torch

    from kvfix.bench.items import Item
    from kvfix.engine import Engine


@dataclass(frozen=True)
class Query:
    """A question and its answers before and after the edit, as token ids; one of the answers may be empty."""

    question: list[int]
    old: list[int]
    new: list[int]

    @classmethod
    def of(cls, engine: Engine, item: Item) -> Query:
        return cls(*(engine.text.plain_ids(text) for text in (item.question, item.old, item.new)))

    @property
    def longest(self) -> int:
        """Rows of the longest text that is tried behind the document."""
        return len(self.question) + max(len(self.old), len(self.new), MAX_NEW)

    @property
    def room(self) -> int:
        """Rows behind the document that `ask` needs: the question once, both answers behind it side by side."""
        return len(self.question) + max(len(self.old) + len(self.new) + 1, MAX_NEW)


@dataclass(frozen=True)
class Answer:
    """What one cache answers."""

    margin: float  # nats
    logprobs: torch.Tensor | None  # [T, V] fp32 at the new answer's positions; None where that is empty
    continuation: str


def ask(engine: Engine, caches: Sequence[KVCache], query: Query) -> list[Answer]:
    """Put the question to all caches in shared passes; their rows stay as they are, their room is used.

    The question is computed once a cache: all of it but its last token becomes part of the text, and the answers are
    tried behind that token. Raises `DocumentError` where the model's context has no room for them.
    """
    from kvfix.engine import Continuation

    for cache in caches:
        engine.require_room(cache, query.longest)
    asked, num_more = [_extended(cache, query.question[:-1]) for cache in caches], len(query.question) - 1
    engine.recompute_many([(longer, np.arange(len(longer) - num_more, len(longer))) for longer in asked])
    last = query.question[-1:]
    sides = [answer for answer in (query.new, query.old) if answer]
    scored = engine.answer_logprobs_of([(cache, Continuation(last, answer)) for cache in asked for answer in sides])
    scores = [_score(query, scored) for _ in asked]
    continued = engine.generate_of([(cache, last) for cache in asked], MAX_NEW)
    return [
        Answer(margin, logprobs, engine.text.decode(ids))
        for (margin, logprobs), ids in zip(scores, continued, strict=True)
    ]


def _extended(cache: KVCache, token_ids: list[int]) -> KVCache:
    """The same tensors as the cache of a longer text, whose last rows lie in the room and are not computed yet."""
    ids = np.concatenate([cache.token_ids, np.asarray(token_ids, np.int64)])
    added = np.arange(len(cache), len(ids))
    return KVCache(cache.keys, cache.values, ids, np.concatenate([cache.origin, added]))


def _score(query: Query, scored: Iterator[torch.Tensor]) -> tuple[float, torch.Tensor | None]:
    """Margin, and the new answer's distributions; `scored` gives those first, then the old answer's."""
    new = next(scored) if query.new else None
    old = next(scored) if query.old else None
    margin = metrics.margin(_mean(new, query.new), _mean(old, query.old))
    # a copy: what is split off a pass would keep all of it in memory
    return margin or 0.0, None if new is None else new.clone()


def _mean(logprobs: torch.Tensor | None, answer: list[int]) -> float | None:
    import torch

    return None if logprobs is None else float(logprobs.gather(1, torch.tensor(answer)[:, None]).mean())
