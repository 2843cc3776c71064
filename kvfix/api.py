"""KVFix: a store and an engine together, for programs - everything the command line does, without its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvfix.config import DEFAULT_INCLUDE, DEFAULT_MAX_BYTES
from kvfix.corpus import Skipped, UnreadableError, document_of, find_document, read_document, resolve_corpus, scan
from kvfix.errors import UnknownDocumentError

if TYPE_CHECKING:
    from kvfix.core import Document, KVCache, Notify
    from kvfix.engine import Engine
    from kvfix.pipeline.ask import Answer
    from kvfix.pipeline.build import Built
    from kvfix.pipeline.edit import EditOptions, EditReport
    from kvfix.pipeline.plan import Change
    from kvfix.pipeline.refresh import Refreshed, RefreshOptions
    from kvfix.pipeline.status import DocumentStatus
    from kvfix.pipeline.sync import Synced, SyncOptions
    from kvfix.pipeline.undo import Restored
    from kvfix.store import Store, VersionRecord


class KVFix:
    """An open store, and the model that its caches belong to.

    The model's tokenizer is loaded when a text is first encoded and its weights when a row is first computed.
    Use as a context manager, or call `close`. Documents are named by a path below a known corpus or by a doc_id.
    """

    def __init__(self, store: Store, open_engine: Callable[[], Engine]) -> None:
        self.store = store
        self._open_engine = open_engine
        self._engine: Engine | None = None

    @classmethod
    def open(
        cls,
        store: str | Path = "cache_store",
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        template: str = "auto",
        create: bool = True,
        read_only: bool = False,
        notify: Notify = lambda line: None,
    ) -> KVFix:
        """Open (or create) a store for a model: a folder, a .gguf file, a hub id; None is the demo model."""
        from kvfix.store import Store

        def engine() -> Engine:
            from kvfix.engine import Engine

            return Engine.open(model, device=device, dtype=dtype, template=template, notify=notify)

        return cls(Store.open(store, create=create and not read_only, read_only=read_only), engine)

    @property
    def engine(self) -> Engine:
        """The model, opened at first use."""
        if self._engine is None:
            self._engine = self._open_engine()
        return self._engine

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> KVFix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- naming

    def record(self, doc: str | Path) -> VersionRecord:
        """The newest version of a document. Raises `UnknownDocumentError` with the candidates."""
        known = [(record.corpus, record.doc_id) for record in self.store.documents()]
        corpus, doc_id = find_document(str(doc), known)
        record = self.store.head(corpus, doc_id)
        if record is None:
            raise UnknownDocumentError(f"{doc_id} was removed from the store; build it again")
        return record

    def document(self, record: VersionRecord, text: str | bytes | None = None) -> Document:
        """The document as its file is now, or with the given text. Raises `DocumentError` for an unreadable file."""
        if text is not None:
            return document_of(record.corpus, record.doc_id, text)
        return read_document(Path(record.corpus) / record.doc_id, record.corpus)

    # ---- verbs

    def build(
        self,
        *paths: str | Path,
        include: Sequence[str] = DEFAULT_INCLUDE,
        exclude: Sequence[str] = (),
        max_bytes: int = DEFAULT_MAX_BYTES,
        force: bool = False,
        progress: Callable[[int], None] = lambda rows: None,
        memory: int | None = None,
    ) -> Iterator[Built]:
        """Prefill and store every document below the paths; unchanged ones are skipped. One outcome a document.

        At most `memory` bytes of rows are computed or wait to be stored at a time, but for a document that takes more
        by itself; None allows a quarter of the free memory.
        """
        from kvfix.pipeline.build import build

        for path in paths:
            _, documents = documents_at(path, self.store.corpora(), include, exclude, max_bytes)
            yield from build(self.engine, self.store, documents, force=force, progress=progress, memory=memory)

    def diff(self, doc: str | Path, text: str | bytes | None = None) -> Change:
        """What has changed between a document's cached and its present (or the given) text. Loads no weights."""
        from kvfix.pipeline.clock import Clock
        from kvfix.pipeline.plan import compare

        record = self.record(doc)
        return compare(self.engine, self.store, record, self.document(record, text), Clock())

    def plan(self, doc: str | Path, options: EditOptions | None = None, text: str | bytes | None = None) -> EditReport:
        """What `repair` would recompute, and why; computes and stores nothing."""
        from dataclasses import replace

        from kvfix.pipeline.edit import EditOptions

        return self.repair(doc, replace(options or EditOptions(), dry_run=True), text)

    def repair(
        self,
        doc: str | Path,
        options: EditOptions | None = None,
        text: str | bytes | None = None,
        notify: Notify = lambda line: None,
    ) -> EditReport:
        """Bring a document's cache up to its present (or the given) text, store it, and report."""
        from kvfix.pipeline.edit import edit

        record = self.record(doc)
        document = self.document(record, text)
        return edit(self.engine, self.store, record, document, options, notify)

    def undo(self, doc: str | Path, dry_run: bool = False) -> Restored:
        """Make the version before a document's newest one the newest again. Raises `UsageError` if it is not kept."""
        from kvfix.pipeline.undo import undo

        return undo(self.store, self.record(doc), dry_run)

    def load(self, doc: str | Path, room: int = 512) -> KVCache:
        """The document's cache `[L, H, N + room, D]`, a fresh copy with every key at its position."""
        from kvfix.pipeline.admission import admit, require_key
        from kvfix.pipeline.load import load_cache

        record = self.record(doc)
        require_key(self.engine, self.store, record)
        admit(self.engine, self.store)
        return load_cache(self.engine, self.store.snapshot(record), room)

    def load_for_generate(self, doc: str | Path) -> tuple[Any, Any]:
        """Token ids `[1, N]` and a transformers `Cache` of the document, a fresh object each time.

        Append a question's ids to the first and give both to `generate` of a model that transformers loaded.
        """
        import torch

        from kvfix.engine import as_transformers_cache

        cache = self.load(doc, 0)
        return torch.from_numpy(cache.token_ids)[None].to(self.engine.device), as_transformers_cache(cache)

    def ask(self, doc: str | Path, question: str, *, compare: bool = False, max_new: int = 64) -> list[Answer]:
        """Answers from the document's cache; with `compare` from its previous, current and a fresh one."""
        from kvfix.pipeline.ask import ask

        return ask(self.engine, self.store, self.record(doc), question, compare=compare, max_new=max_new)

    def sync(
        self,
        *paths: str | Path,
        options: SyncOptions | None = None,
        include: Sequence[str] = DEFAULT_INCLUDE,
        exclude: Sequence[str] = (),
        max_bytes: int = DEFAULT_MAX_BYTES,
        allow_empty: bool = False,
        notify: Notify = lambda line: None,
    ) -> Iterator[Synced]:
        """Bring the caches of all documents below the paths up to their files; one outcome a document.

        Loads neither torch nor the model where nothing has changed. Each commit takes the writer lock for itself; hold
        `store.writing` where no other writer may come between them. Raises `UsageError`, and nothing is done, for a
        path where there is nothing to read, unless the store knows it and `allow_empty` is set.
        """
        from kvfix.pipeline.changes import Walk, source_at
        from kvfix.pipeline.sync import SyncOptions, sync

        walk = Walk(tuple(include), tuple(exclude), max_bytes)
        sources = [source_at(path, self.store, walk, allow_empty) for path in paths]
        return sync(lambda: self.engine, self.store, sources, options or SyncOptions(), walk, notify)

    def refresh(
        self,
        *paths: str | Path,
        options: RefreshOptions | None = None,
        notify: Notify = lambda line: None,
    ) -> Iterator[Refreshed]:
        """Prefill documents with debt anew, most debt first: of the whole store, or below the paths."""
        from kvfix.pipeline.refresh import RefreshOptions, refresh

        records = {(r.corpus, r.doc_id): r for path in paths or (None,) for r in self.select(path)}
        return refresh(lambda: self.engine, self.store, list(records.values()), options or RefreshOptions(), notify)

    def status(self, path: str | Path | None = None) -> list[DocumentStatus]:
        """The state of every document, or of those below a path; imports no torch."""
        from kvfix.pipeline.status import statuses

        return statuses(self.select(path))

    def select(self, path: str | Path | None = None) -> list[VersionRecord]:
        """The newest versions of all documents, or of those below a path (or of the one document named)."""
        records = self.store.documents()
        if path is None:
            return records
        root = Path(path).absolute()
        below = [r for r in records if (Path(r.corpus) / r.doc_id).is_relative_to(root.resolve())]
        return below or [self.record(path)]


def documents_at(
    path: str | Path,
    known_corpora: Sequence[str],
    include: Sequence[str] = DEFAULT_INCLUDE,
    exclude: Sequence[str] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> tuple[str, Iterator[Document | Skipped]]:
    """The corpus of a path, and the documents of the directory or the file there, read as they are asked for.

    Raises `UsageError` for a path without documents.
    """
    corpus = resolve_corpus(path, known_corpora)
    if Path(path).is_dir():
        return corpus, scan(path, include, exclude, max_bytes)
    try:
        return corpus, iter([read_document(path, corpus, max_bytes)])
    except UnreadableError as error:
        return corpus, iter([Skipped(Path(path).absolute().relative_to(corpus).as_posix(), error.reason)])
