"""Verify: stored bytes against their checksums; deep, a sample of caches against a fresh prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfix.pipeline.admission import admit, require_key
from kvfix.pipeline.load import load_cache

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord

TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


@dataclass(frozen=True)
class DeepCheck:
    """One cache beside a fresh prefill of its text; errors relative to max(1, a layer's largest entry)."""

    doc_id: str
    exact_rows: int
    error_exact: float  # over the rows that claim to equal a fresh prefill
    error_stale: float | None  # over the others: what the debt amounts to
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error_exact <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "ok": self.ok}


def deep_verify(
    engine: Engine, store: Store, records: Sequence[VersionRecord], sample: int, seed: int = 0
) -> Iterator[DeepCheck]:
    """Re-prefill up to `sample` documents and compare; rows beyond `exact_until` are reported, not judged."""
    filled = [record for record in records if record.num_tokens]
    chosen = random.Random(seed).sample(filled, min(sample, len(filled)))
    for record in sorted(chosen, key=lambda r: (r.corpus, r.doc_id)):
        require_key(engine, store, record)
        admit(engine, store)
        yield _check(engine, store, record)


def _check(engine: Engine, store: Store, record: VersionRecord) -> DeepCheck:
    from kvfix.engine.gate import deviation

    cache = load_cache(engine, store.snapshot(record, check=True), 0)
    fresh = engine.prefill(cache.token_ids)
    until = record.debt.exact_until
    stale = deviation(cache, fresh, slice(until, None)) if until < len(cache) else None
    exact = deviation(cache, fresh, slice(0, until)) if until else 0.0
    return DeepCheck(record.doc_id, until, exact, stale, _tolerance(engine))


def _tolerance(engine: Engine) -> float:
    """What rounding may do: in half precision it may send a row to other experts, which the gate has measured."""
    dtype = engine.dtype_name
    noise = (engine.gate_report or {}).get("noise", {}).get("rows", 0.0)
    return TOLERANCE[dtype] if dtype == "float32" else max(TOLERANCE[dtype], 2 * noise)
