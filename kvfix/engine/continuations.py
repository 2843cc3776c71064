"""Texts tried behind a document: several at once share the room behind its rows, none of them sees another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvfix.core import KVCache
from kvfix.engine.cache import Rows
from kvfix.errors import DocumentError

if TYPE_CHECKING:
    from kvfix.engine.engine import Engine


class Continuation(NamedTuple):
    """Text tried behind a document: a query, and an answer whose likelihood is asked for."""

    query_ids: list[int]
    answer_ids: list[int]


def answer_logprobs(engine: Engine, cache: KVCache, tried: Sequence[Continuation]) -> Iterator[torch.Tensor]:
    """Log-probabilities `[T, V]` (fp32, CPU) at each answer's T positions, a roomful at a time."""
    lengths = [len(t.query_ids) + len(t.answer_ids) for t in tried]
    for batch in _batches(engine, cache, lengths):
        slots = _behind(cache, [lengths[index] for index in batch])
        groups, wanted, start = [], [], 0
        for index, places in zip(batch, slots, strict=True):
            query, answer = tried[index]
            groups.append(_tail(cache, places, 0, [*query, *answer]))
            wanted += [start + len(query) - 1 + step for step in range(len(answer))]
            start += lengths[index]
        logprobs = engine.logits(groups, wanted).float().log_softmax(-1).cpu()
        yield from torch.split(logprobs, [len(tried[index].answer_ids) for index in batch])


def generate(engine: Engine, cache: KVCache, queries: Sequence[list[int]], max_new: int) -> list[list[int]]:
    """Greedy continuations of several queries."""
    results: list[list[int]] = []
    for batch in _batches(engine, cache, [len(query) + max_new for query in queries]):
        results += _decode(engine, cache, [queries[index] for index in batch], max_new)
    return results


def _decode(engine: Engine, cache: KVCache, queries: list[list[int]], max_new: int) -> list[list[int]]:
    """Token by token, one pass a step for all queries that have not ended; they fit the room together."""
    slots = _behind(cache, [len(query) + max_new for query in queries])
    results: list[list[int]] = [[] for _ in queries]
    pending, done = dict(enumerate(queries)), [0] * len(queries)
    for _ in range(max_new):
        groups = [_tail(cache, slots[n], done[n], ids) for n, ids in pending.items()]
        ends = np.cumsum([len(rows) for rows in groups]) - 1
        chosen = engine.logits(groups, ends.tolist()).argmax(-1).tolist()
        for n, token in zip(list(pending), chosen, strict=True):
            done[n] += len(pending[n])
            if token in engine.stop_ids:
                del pending[n]
                continue
            results[n].append(token)
            pending[n] = [token]
        if not pending:
            break
    return results


def _batches(engine: Engine, cache: KVCache, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts that fit the room together, in order. Raises `DocumentError` where one alone does not."""
    room, used = cache.capacity - len(cache), 0
    batch: list[int] = []
    for index, length in enumerate(lengths):
        engine.require_room(cache, length)
        if length > room:
            raise DocumentError(f"a question and answer of {length} tokens; the room behind the document is {room}")
        if used + length > room:
            yield batch
            batch, used = [], 0
        batch.append(index)
        used += length
    if batch:
        yield batch


def _behind(cache: KVCache, lengths: Sequence[int]) -> list[np.ndarray]:
    """Slots in the room for texts of these lengths, side by side."""
    starts = len(cache) + np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _tail(cache: KVCache, slots: np.ndarray, done: int, token_ids: Sequence[int]) -> Rows:
    """The next rows of a text whose slots are `slots`, of which `done` are computed already."""
    end = done + len(token_ids)
    num_rows = len(cache)
    seen = np.full(int(slots[end - 1]) + 1, np.iinfo(np.int64).max)
    seen[:num_rows] = np.arange(num_rows)
    seen[slots[:end]] = num_rows + np.arange(end)
    positions = num_rows + np.arange(done, end)
    return Rows(cache, np.asarray(token_ids, np.int64), positions, slots[done:end], torch.from_numpy(seen))
