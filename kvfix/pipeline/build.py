"""Build: prefill documents and store their caches; a cache is written while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvfix import debt
from kvfix.core import Document
from kvfix.corpus import Skipped
from kvfix.errors import DocumentError
from kvfix.pipeline.admission import admit, require_key
from kvfix.pipeline.behind import Behind, Computed
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.packs import Limits, held, together

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
class Job:
    """A document to be prefilled in the place of its head."""

    document: Document
    token_ids: np.ndarray
    head: VersionRecord | None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def held_rows(self) -> int:
        return self.num_rows


def build(
    engine: Engine,
    store: Store,
    documents: Iterable[Document | Skipped],
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
    memory: int | None = None,
) -> Iterator[Built]:
    """Prefill and store what is new or changed; one outcome a document, in order of completion.

    Unchanged documents are skipped unless `force`. A document that cannot be done is reported as skipped and the
    rest goes on. At most `memory` bytes of rows are computed or wait to be written at a time, but for a document that
    takes more by itself; None allows a quarter of the free memory. Raises `ModelMismatchError` for a document that
    another model built (unless `force`), and what the gate and the store raise; what was committed until then stays.
    """
    with Behind[Built](memory) as behind:
        pack: list[Job] = []
        for document in documents:
            job = _job(engine, store, document, force)
            if isinstance(job, Built):
                yield job
                continue
            admit(engine, store)
            if not limits(engine, behind.most_bytes).allow(pack, job):
                yield from _prefilled(engine, store, pack, behind, progress)
                pack = []
            pack.append(job)
        if pack:
            yield from _prefilled(engine, store, pack, behind, progress)
        yield from behind.rest()


def _prefilled(
    engine: Engine, store: Store, pack: Sequence[Job], behind: Behind[Built], progress: Callable[[int], None]
) -> Iterator[Built]:
    """Compute a pack and hand it to the writer; the outcomes that have come until then."""
    yield from behind.results(held(pack) * engine.row_bytes)
    for done in together(pack, lambda jobs: prefill(engine, store, jobs, progress)):
        behind.hand(done.result())


def limits(engine: Engine, most_bytes: int) -> Limits:
    """What a pass over new documents may take: of a device's own memory, half of what is free."""
    free = engine.free_bytes
    most_bytes = most_bytes if free is None else min(most_bytes, free // 2)
    return Limits(PACK_ROWS, most_bytes // engine.row_bytes)


def prefill(
    engine: Engine, store: Store, jobs: Sequence[Job], progress: Callable[[int], None] = lambda rows: None
) -> list[Computed[Built]]:
    """The documents' caches, computed in one pass, and how to store them. Raises `NonFiniteError` when stored."""
    return [
        Computed(partial(_write, engine, store, job, cache, ms), 0 if cache is None else len(cache) * cache.row_bytes)
        for job, cache, ms in _prefill(engine, jobs, progress)
    ]


def fresh(engine: Engine, store: Store, document: Document, head: VersionRecord | None) -> Computed[VersionRecord]:
    """Prefill one document, to be committed as a new base."""
    encoding = engine.encode(document.text)
    cache = engine.prefill(encoding.token_ids) if len(encoding.offsets) else None
    num_bytes = 0 if cache is None else len(cache) * cache.row_bytes
    return Computed(partial(_commit, engine, store, document, cache, head), num_bytes)


def store_fresh(engine: Engine, store: Store, document: Document, head: VersionRecord | None) -> VersionRecord:
    """Prefill one document and commit it as a new base."""
    return fresh(engine, store, document, head).commit()


def _job(engine: Engine, store: Store, document: Document | Skipped, force: bool) -> Built | Job:
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
    return Job(document, ids, head)


def _prefill(
    engine: Engine, jobs: Sequence[Job], progress: Callable[[int], None]
) -> list[tuple[Job, KVCache | None, float]]:
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


def _write(engine: Engine, store: Store, job: Job, cache: KVCache | None, prefill_ms: float) -> Built:
    clock = Clock({"prefill": prefill_ms})
    with clock("persist"):
        record = _commit(engine, store, job.document, cache, job.head)
    return Built(job.document.doc_id, "built", None, record, clock.ms)


def _commit(
    engine: Engine, store: Store, document: Document, cache: KVCache | None, head: VersionRecord | None
) -> VersionRecord:
    owed = debt.fresh(0 if cache is None else len(cache))
    return store.commit_base(document, engine.key, cache, owed, {"strategy": "full"}, head)
