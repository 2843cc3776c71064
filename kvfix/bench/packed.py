"""Repairs of several documents in one pass, against the same repairs one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfix.bench.ceilings import free_bytes
from kvfix.bench.roofline import Roofline
from kvfix.bench.texts import Texts, allowed_error, distance, plan_of, versions
from kvfix.core import KVCache, Notify
from kvfix.errors import KVFixError, UsageError
from kvfix.pipeline.measure import ROUNDS, ratio_spread, spread, timed_ms

if TYPE_CHECKING:
    from kvfix.engine import Engine

SCHEMA = "kvfix.packed/1"
PLACE = 1 / 3  # of the edit
LEAST_TOKENS = 8
USABLE = 0.8  # of the free memory

Job = tuple[KVCache, np.ndarray]  # a stale cache of the new tokens, and the positions to recompute


@dataclass(frozen=True)
class PackedOptions:
    """How many documents share a pass, and what each is. Raises `UsageError` for values that make no sense."""

    documents: Sequence[int]
    context: int  # tokens of each
    k: int
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        if min(self.documents) < 1:
            raise UsageError("a pass has at least one document")
        if self.context < LEAST_TOKENS:
            raise UsageError(f"no room for an edit in {self.context} tokens")


def run_packed(engine: Engine, options: PackedOptions, notify: Notify = lambda line: None) -> dict[str, Any]:
    """The `kvfix.packed/1` document: one row a number of documents.

    Each document has a text of its own, one token of which is edited a third in, and is repaired by editlocal. No time
    is reported unless the rows of the packed pass equal those of single passes. Raises `UsageError` where the documents
    do not fit into memory together, and `DocumentError` for a context that the model cannot take.
    """
    engine.require_fit(options.context)
    require_memory(engine, max(options.documents), options.context)
    roofline, jobs, rows = Roofline(engine), list[Job](), list[dict[str, Any]]()
    for number in sorted(set(options.documents)):
        while len(jobs) < number:
            notify(f"prefilling document {len(jobs) + 1} of {max(options.documents)}")
            jobs.append(_job(engine, options, len(jobs)))
        notify(f"{number} documents a pass")
        rows.append(_row(engine, options, jobs[:number]))
        roofline.measure_again()
    return {
        "schema": SCHEMA,
        "model": engine.describe(),
        "context": options.context,
        "k": options.k,
        "rounds": options.rounds,
        "rows": [_beside_roofline(row, roofline) for row in rows],
        "ceilings": roofline.describe(),
        "device": str(engine.device),
        "dtype": engine.dtype_name,
        "versions": versions(),
    }


def require_memory(engine: Engine, documents: int, context: int) -> None:
    """Raise `UsageError` unless so many caches, and what a pass over their rows takes, fit into the free memory."""
    needed, free = documents * context * engine.row_bytes, free_bytes(engine.device)
    if needed > USABLE * free:
        raise UsageError(
            f"{documents} documents of {context} tokens take {needed / 1e9:.2f} GB of rows, and {free / 1e9:.2f} GB "
            f"are free on {engine.device}: lower --documents or --context"
        )


def _job(engine: Engine, options: PackedOptions, number: int) -> Job:
    """One document: the cache of its old text under the tokens of its new one."""
    texts = Texts(engine, options.context, seed=number)
    stale = engine.prefill(engine.encode(texts.changed(int(PLACE * options.context), 1)).token_ids)
    plan = plan_of(engine, stale.token_ids, texts.text, options.k)
    return KVCache(stale.keys, stale.values, texts.token_ids, stale.origin), plan.positions


def _row(engine: Engine, options: PackedOptions, jobs: Sequence[Job]) -> dict[str, Any]:
    """Equality first, then interleaved rounds; the rows that a repair reads are left as they were by every other."""
    error = packed_error(engine, jobs)
    cache, positions = jobs[0]
    if not error <= allowed_error(engine, cache.token_ids, int(positions[0])):
        raise KVFixError(f"a packed pass differs from single ones by {error:.2e}; no times are reported")
    packed, single = list[float](), list[float]()
    for _ in range(options.rounds + 1):
        packed.append(timed_ms(engine, lambda: engine.recompute_many(jobs)))
        single.append(timed_ms(engine, lambda: _one_by_one(engine, jobs)))
    packed, single = packed[1:], single[1:]  # the first round warms up
    return {
        "documents": len(jobs),
        "positions": [positions for _, positions in jobs],
        "recomputed": sum(len(positions) for _, positions in jobs),
        "max_abs_error": error,
        "packed_ms": spread(packed),
        "single_ms": spread(single),
        "packed_documents_per_s": len(jobs) / spread(packed)["median"] * 1e3,
        "single_documents_per_s": len(jobs) / spread(single)["median"] * 1e3,
        "speedup_packed": ratio_spread(single, packed),
    }


def _one_by_one(engine: Engine, jobs: Sequence[Job]) -> None:
    for cache, positions in jobs:
        engine.recompute(cache, positions)


def packed_error(engine: Engine, jobs: Sequence[Job]) -> float:
    """Largest |difference| of a recomputed entry between one pass over all documents and one for each."""
    _one_by_one(engine, jobs)
    alone = [_rows(*job) for job in jobs]
    for cache, positions in jobs:
        # what the packed pass leaves out would otherwise look right
        cache.keys[:, :, positions] = float("nan")
        cache.values[:, :, positions] = float("nan")
    engine.recompute_many(jobs)
    return float(np.max([distance(_rows(*job), before) for job, before in zip(jobs, alone, strict=True)]))


def _rows(cache: KVCache, positions: np.ndarray) -> KVCache:
    """A copy of the rows at these positions."""
    keys, values = cache.keys[:, :, positions], cache.values[:, :, positions]
    return KVCache(keys, values, cache.token_ids[positions], cache.origin[positions])


def _beside_roofline(row: dict[str, Any], roofline: Roofline) -> dict[str, Any]:
    """The row with what one pass, and what one a document, has to do at least."""
    groups, counts = row.pop("positions"), roofline.counts
    alone = counts.one_pass(groups[:1])
    for positions in groups[1:]:
        alone = alone.joined(counts.one_pass([positions]))
    return {
        **row,
        "roofline": {
            "packed": roofline.beside(counts.one_pass(groups), row["packed_ms"]["median"]),
            "single": roofline.beside(alone, row["single_ms"]["median"]),
        },
    }
