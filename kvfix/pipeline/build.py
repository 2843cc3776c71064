"""Build: prefill documents and store their caches; a cache is written while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfix import debt
from kvfix.core import Document
from kvfix.corpus import Skipped
from kvfix.errors import DocumentError
from kvfix.pipeline.admission import admit, require_key
from kvfix.pipeline.clock import Clock

if TYPE_CHECKING:
    import numpy as np

    from kvfix.core import KVCache
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord

# short documents share a pass up to this many rows
PACK_ROWS = 512


@dataclass(frozen=True)
class Built:
    """What became of one document."""

    doc_id: str
    outcome: str  # built, unchanged, skipped
    reason: str | None = None
    record: VersionRecord | None = None
    timing_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    document: Document
    token_ids: np.ndarray
    head: VersionRecord | None


def build(
    engine: Engine,
    store: Store,
    documents: Iterable[Document | Skipped],
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> Iterator[Built]:
    """Prefill and store what is new or changed; one outcome a document, in order of completion.

    Unchanged documents are skipped unless `force`. A document that cannot be done is reported as skipped and the
    rest goes on. Raises `ModelMismatchError` for a document that another model built (unless `force`), and what the
    gate and the store raise; whatever was committed until then stays.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="kvfix-write") as writer:
        behind: list[Future[Built]] = []
        for batch in _batches(engine, store, documents, force):
            if isinstance(batch, Built):
                yield batch
                continue
            admit(engine, store)
            computed = _prefill(engine, batch, progress)
            # at most one batch waits for the disk, so memory stays bounded
            yield from (future.result() for future in behind)
            behind = [writer.submit(_write, engine, store, job, cache, ms) for job, cache, ms in computed]
        yield from (future.result() for future in behind)


def store_fresh(engine: Engine, store: Store, document: Document, head: VersionRecord | None) -> VersionRecord:
    """Prefill one document and commit it as a new base."""
    encoding = engine.encode(document.text)
    cache = engine.prefill(encoding.token_ids) if len(encoding.offsets) else None
    return _commit(engine, store, document, cache, head)


def build_one(engine: Engine, store: Store, document: Document, token_ids: np.ndarray) -> Built:
    """Prefill and store one document that is not in the store. Raises what `build` does, and `NonFiniteError`."""
    admit(engine, store)
    ((job, cache, prefill_ms),) = _prefill(engine, [_Job(document, token_ids, None)], lambda rows: None)
    return _write(engine, store, job, cache, prefill_ms)


def _batches(
    engine: Engine, store: Store, documents: Iterable[Document | Skipped], force: bool
) -> Iterator[Built | list[_Job]]:
    """Documents that are done already, and jobs in packs whose rows fit one pass."""
    pack: list[_Job] = []
    for document in documents:
        job = _job(engine, store, document, force)
        if isinstance(job, Built):
            yield job
            continue
        if pack and sum(len(j.token_ids) for j in pack) + len(job.token_ids) > PACK_ROWS:
            yield pack
            pack = []
        pack.append(job)
    if pack:
        yield pack


def _job(engine: Engine, store: Store, document: Document | Skipped, force: bool) -> Built | _Job:
    if isinstance(document, Skipped):
        return Built(document.doc_id, "skipped", document.reason)
    head = store.head(document.corpus, document.doc_id)
    if head is not None and not force:
        require_key(engine, store, head)
        if head.text_sha256 == document.sha256:
            return Built(document.doc_id, "unchanged", "the text is the one that is cached", head)
    try:
        ids = engine.encode(document.text).token_ids
    except DocumentError as error:
        return Built(document.doc_id, "skipped", error.message)
    return _Job(document, ids, head)


def _prefill(
    engine: Engine, jobs: list[_Job], progress: Callable[[int], None]
) -> list[tuple[_Job, KVCache | None, float]]:
    """The jobs' caches; empty documents have none."""
    clock = Clock()
    filled = [job for job in jobs if len(job.token_ids) > len(engine.text.prefix)]
    with clock("prefill"):
        if len(filled) == 1:
            caches = [engine.prefill(filled[0].token_ids, progress=progress)]
        else:
            caches = engine.prefill_many([job.token_ids for job in filled])
            progress(sum(len(cache) for cache in caches))
    total = sum(len(cache) for cache in caches)
    by_document = {id(job): cache for job, cache in zip(filled, caches, strict=True)}
    share = clock.ms["prefill"] / max(1, total)
    return [
        (job, by_document.get(id(job)), share * len(job.token_ids) if id(job) in by_document else 0.0) for job in jobs
    ]


def _write(engine: Engine, store: Store, job: _Job, cache: KVCache | None, prefill_ms: float) -> Built:
    clock = Clock({"prefill": prefill_ms})
    with clock("persist"):
        record = _commit(engine, store, job.document, cache, job.head)
    return Built(job.document.doc_id, "built", None, record, clock.ms)


def _commit(
    engine: Engine, store: Store, document: Document, cache: KVCache | None, head: VersionRecord | None
) -> VersionRecord:
    owed = debt.fresh(0 if cache is None else len(cache))
    return store.commit_base(document, engine.key, cache, owed, {"strategy": "full"}, head)
