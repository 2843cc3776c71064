"""Texts tried behind documents: several share a pass and the room behind their rows, none of them sees another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvfix.core import KVCache
from kvfix.engine.cache import NEVER, Rows
from kvfix.errors import DocumentError

if TYPE_CHECKING:
    from kvfix.engine.engine import Engine

# rows of one pass, unless one text alone has more: bounds what its logits take
PASS_ROWS = 512


class Continuation(NamedTuple):
    """Text tried behind a document: a query, and an answer whose likelihood is asked for."""

    query_ids: list[int]
    answer_ids: list[int]


def answer_logprobs(engine: Engine, jobs: Sequence[tuple[KVCache, Continuation]]) -> Iterator[torch.Tensor]:
    """Log-probabilities `[T, V]` (fp32, CPU) at each answer's T positions, a batch at a time."""
    lengths = [len(tried.query_ids) + len(tried.answer_ids) for _, tried in jobs]
    for batch in _batches(engine, [cache for cache, _ in jobs], lengths, lengths):
        slots = _side_by_side([jobs[index][0] for index in batch], [lengths[index] for index in batch])
        groups, wanted, start = [], [], 0
        for index, places in zip(batch, slots, strict=True):
            cache, (query, answer) = jobs[index]
            groups.append(_tail(cache, places, 0, [*query, *answer]))
            wanted += [start + len(query) - 1 + step for step in range(len(answer))]
            start += lengths[index]
        logprobs = engine.logits(groups, wanted).float().log_softmax(-1).cpu()
        yield from torch.split(logprobs, [len(jobs[index][1].answer_ids) for index in batch])


def generate(engine: Engine, jobs: Sequence[tuple[KVCache, list[int]]], max_new: int) -> list[list[int]]:
    """Greedy continuations of queries, each behind its cache's document."""
    results: list[list[int]] = []
    caches, rows = [cache for cache, _ in jobs], [len(query) for _, query in jobs]
    for batch in _batches(engine, caches, [num_rows + max_new for num_rows in rows], rows):
        results += _decode(engine, [jobs[index] for index in batch], max_new)
    return results


def _decode(engine: Engine, jobs: Sequence[tuple[KVCache, list[int]]], max_new: int) -> list[list[int]]:
    """Token by token, one pass a step for all queries that have not ended; they fit their rooms together."""
    slots = _side_by_side([cache for cache, _ in jobs], [len(query) + max_new for _, query in jobs])
    results: list[list[int]] = [[] for _ in jobs]
    pending, done = {n: query for n, (_, query) in enumerate(jobs)}, [0] * len(jobs)
    for _ in range(max_new):
        groups = [_tail(jobs[n][0], slots[n], done[n], ids) for n, ids in pending.items()]
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


def _batches(
    engine: Engine, caches: Sequence[KVCache], lengths: Sequence[int], rows: Sequence[int]
) -> Iterator[list[int]]:
    """Indices of texts that one pass takes, in order: each cache's fit its room together, their first rows `PASS_ROWS`.

    `lengths` are the texts' in the end, `rows` those of the pass. Raises `DocumentError` for a text that does not fit
    alone.
    """
    batch: list[int] = []
    used: dict[int, int] = {}  # rows of each cache's room, by its id
    for index, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        engine.require_room(cache, length)
        room = cache.capacity - len(cache)
        if length > room:
            raise DocumentError(f"a question and answer of {length} tokens; the room behind the document is {room}")
        full = used.get(id(cache), 0) + length > room or sum(rows[n] for n in batch) + rows[index] > PASS_ROWS
        if batch and (full or not _share_frequencies(engine, caches[batch[0]], cache)):
            yield batch
            batch, used = [], {}
        batch.append(index)
        used[id(cache)] = used.get(id(cache), 0) + length
    if batch:
        yield batch


def _share_frequencies(engine: Engine, one: KVCache, other: KVCache) -> bool:
    """Whether one pass may hold both: beyond LongRoPE's limit the longest text decides for all."""
    return engine.positions.crosses(len(one), len(one)) == engine.positions.crosses(len(other), len(other))


def _side_by_side(caches: Sequence[KVCache], lengths: Sequence[int]) -> list[np.ndarray]:
    """Slots in the caches' rooms for texts of these lengths; those behind one document stand one after another."""
    ends: dict[int, int] = {}
    slots = []
    for cache, length in zip(caches, lengths, strict=True):
        start = ends.get(id(cache), len(cache))
        ends[id(cache)] = start + length
        slots.append(np.arange(start, start + length))
    return slots


def _tail(cache: KVCache, slots: np.ndarray, done: int, token_ids: Sequence[int]) -> Rows:
    """The next rows of a text whose slots are `slots`, of which `done` are computed already."""
    end = done + len(token_ids)
    num_rows = len(cache)
    seen = np.full(int(slots[end - 1]) + 1, NEVER)
    seen[:num_rows] = np.arange(num_rows)
    seen[slots[:end]] = num_rows + np.arange(end)
    positions = num_rows + np.arange(done, end)
    return Rows(cache, np.asarray(token_ids, np.int64), positions, slots[done:end], torch.from_numpy(seen))
