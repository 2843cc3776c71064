"""Texts tried behind documents: several share a pass and the room behind their rows, none of them sees another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass
class Branches:
    """Answers to one query behind one document; the query's rows serve them all."""

    cache: KVCache
    query_ids: list[int]
    answers: list[list[int]]

    @property
    def room(self) -> int:
        """Slots that all of it takes."""
        return len(self.query_ids) + sum(map(len, self.answers))

    @property
    def num_rows(self) -> int:
        """Rows of a pass: nothing follows an answer's last token."""
        return self.room - len(self.answers)

    def rows(self, slots: np.ndarray) -> Iterator[Rows]:
        """The query's rows with those of the first answer, then those of the others; each answer sees the query."""
        num_query, first = len(self.query_ids), [*self.query_ids, *self.answers[0][:-1]]
        yield _tail(self.cache, slots, 0, first)
        start = len(first)
        for answer in self.answers[1:]:
            own = slots[start : start + len(answer) - 1]
            if len(own):
                yield _tail(self.cache, np.concatenate([slots[:num_query], own]), num_query, answer[:-1])
            start += len(own)

    def wanted(self, start: int) -> Iterator[int]:
        """Rows of a pass, this one's beginning at `start`, whose logits are about the answers' tokens, one by one."""
        end = start + len(self.query_ids)
        for answer in self.answers:
            yield start + len(self.query_ids) - 1
            yield from range(end, end + len(answer) - 1)
            end += len(answer) - 1


def answer_logprobs(engine: Engine, jobs: Sequence[tuple[KVCache, Continuation]]) -> Iterator[torch.Tensor]:
    """Log-probabilities `[T, V]` (fp32, CPU) at each answer's T positions, a batch at a time."""
    tried = _branches(jobs)
    caches, rooms = [one.cache for one in tried], [one.room for one in tried]
    for batch in _batches(engine, caches, rooms, [one.num_rows for one in tried]):
        slots = _side_by_side([caches[index] for index in batch], [rooms[index] for index in batch])
        groups, wanted, start = list[Rows](), list[int](), 0
        for index, places in zip(batch, slots, strict=True):
            groups += tried[index].rows(places)
            wanted += tried[index].wanted(start)
            start += tried[index].num_rows
        logprobs = engine.logits(groups, wanted).float().log_softmax(-1).cpu()
        yield from torch.split(logprobs, [len(answer) for index in batch for answer in tried[index].answers])


def _branches(jobs: Sequence[tuple[KVCache, Continuation]]) -> list[Branches]:
    """The jobs in order; those that follow one another with one query, as far as they fit a room and a pass, as one."""
    found: list[Branches] = []
    for cache, (query, answer) in jobs:
        last = found[-1] if found else None
        if last is not None and last.cache is cache and last.query_ids == query:
            larger = Branches(cache, query, [*last.answers, answer])
            if larger.room <= cache.capacity - len(cache) and larger.num_rows <= PASS_ROWS:
                found[-1] = larger
                continue
        found.append(Branches(cache, query, [answer]))
    return found


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
