"""The store: stored caches of many documents, one directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvfix import align
from kvfix.core import Document, KVCache
from kvfix.errors import StoreNotWritableError, UnknownDocumentError, UsageError
from kvfix.store import audit, files, garbage, models, rebuild, schema
from kvfix.store.audit import Damage
from kvfix.store.commits import Committer, Proposal, try_base
from kvfix.store.create import create_store, require_store
from kvfix.store.damage import DamagedFileError
from kvfix.store.garbage import GcReport
from kvfix.store.layout import Layout
from kvfix.store.lock import WriterLock
from kvfix.store.manifest import Change, Manifest, check_expected
from kvfix.store.newfiles import NewFiles
from kvfix.store.rebuild import Rebuilt
from kvfix.store.records import Detail, VersionRecord, decode, should_fold
from kvfix.store.segments import NewRows
from kvfix.store.snapshot import Snapshot, open_snapshot

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvfix.core import Debt, ModelKey

BUSY_S = 5.0


class Store:
    """One store directory. Reading needs no lock; every change is one transaction under the writer lock.

    All methods raise StoreDamagedError where a file is not as it was written, changes raise StoreBusyError and
    StoreNotWritableError; the document's old entry then stands as before.
    """

    def __init__(self, layout: Layout, manifest: Manifest, *, read_only: bool, busy_s: float) -> None:
        self.path = layout.root
        self.read_only = read_only
        self._layout = layout
        self._manifest = manifest
        self._busy_s = busy_s
        self._lock = WriterLock(layout)

    @classmethod
    def open(
        cls,
        path: str | Path,
        create: bool = False,
        read_only: bool = False,
        *,
        busy_s: float = BUSY_S,
        keep: int | None = None,
    ) -> Store:
        """Open the store at `path`; `create` makes one where there is none.

        StoreMissingError without a store, UsageError for a foreign directory or a newer format. Waits at most
        `busy_s` seconds for another process's transaction. `keep` is how many versions a commit leaves behind the new
        one, None what the store itself says (1).
        """
        layout = Layout(Path(path).absolute())
        manifest = Manifest(layout.manifest, read_only=read_only, busy_s=busy_s, keep=keep)
        if create and not read_only:
            create_store(layout, manifest)
        require_store(layout)
        manifest.check_format()
        return cls(layout, manifest, read_only=read_only, busy_s=busy_s)

    def close(self) -> None:
        self._manifest.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def writing(self, verb: str, timeout: float = 0.0) -> Iterator[None]:
        """Hold the writer lock; StoreBusyError, naming its holder, if it is not free within `timeout` seconds.

        Changes made without it take it for themselves, and wait as long as for a transaction.
        """
        self._check_writable()
        with self._lock.held(verb, timeout):
            yield

    # reading

    def head(self, corpus: str, doc_id: str) -> VersionRecord | None:
        """The newest version, None if the document is not in the store."""
        return self._manifest.head(corpus, doc_id)

    def documents(self, corpus: str | None = None) -> list[VersionRecord]:
        """The head of every document, sorted by corpus and doc_id; no file but the manifest is read."""
        return self._manifest.heads(corpus)

    def corpora(self) -> list[str]:
        return self._manifest.corpora()

    def version(self, corpus: str, doc_id: str, number: int) -> VersionRecord | None:
        """A version that is still kept, else None."""
        return self._manifest.version(corpus, doc_id, number)

    def previous(self, record: VersionRecord) -> VersionRecord | None:
        """The version before, None if it is no longer kept or the document was not in the store."""
        before = self.version(record.corpus, record.doc_id, record.version - 1)
        return before if before and before.kind != "tombstone" else None

    def detail(self, record: VersionRecord) -> Detail:
        """The whole record file: segments, report, and the text of an empty document."""
        try:
            return self._detail(record)
        except FileNotFoundError as error:
            raise _missing(record, error) from error

    def snapshot(self, record: VersionRecord, check: bool = False) -> Snapshot:
        """The version's token ids, row map, mapped segments and text, opened at once.

        If it has been replaced and its files are gone, the head takes its place: see the snapshot's record.
        `check` reads everything and compares checksums. UnknownDocumentError if the document has been removed.
        """
        if record.kind == "tombstone":
            raise _removed(record)
        try:
            return open_snapshot(self._layout, self._detail(record), check)
        except FileNotFoundError:
            record = self._again(record)
        try:
            return open_snapshot(self._layout, self._detail(record), check)
        except FileNotFoundError as error:
            raise _missing(record, error) from error

    def _again(self, record: VersionRecord) -> VersionRecord:
        same = self.version(record.corpus, record.doc_id, record.version)
        found = same or self.head(record.corpus, record.doc_id)
        if found is None or found.kind == "tombstone":
            raise _removed(record)
        return found

    def _detail(self, record: VersionRecord) -> Detail:
        path = self._layout.record(record.record_id)
        return decode(files.read_bytes(self._layout, path), path)

    # changing

    @contextmanager
    def _commit(self, verb: str) -> Iterator[Committer]:
        """One commit under the writer lock, whose files are taken back if it fails."""
        with self.writing(verb, self._busy_s), NewFiles(self._layout, self._manifest) as new:
            yield Committer(self._layout, self._manifest, new)

    def commit_base(
        self,
        document: Document,
        key: ModelKey,
        cache: KVCache | None,
        debt: Debt,
        report: dict[str, Any],
        expect: VersionRecord | None,
        fold: bool = False,
    ) -> VersionRecord:
        """Make a whole cache the document's newest version; None is the cache of an empty document.

        `expect` is the head that was read, None for a new document: StoreBusyError if it is another by now.
        `fold` takes the place of `expect` under the same version number. NonFiniteError, and nothing is
        written, if a row is NaN or infinite.
        """
        with self._commit("commit") as commit:
            return commit.base(Proposal(document, key, debt, report, expect, fold), cache)

    def commit_patch(
        self,
        document: Document,
        key: ModelKey,
        snapshot: Snapshot,
        source: np.ndarray,
        positions: np.ndarray,
        keys: torch.Tensor,
        values: torch.Tensor,
        token_ids: np.ndarray,
        debt: Debt,
        report: dict[str, Any],
        expect: VersionRecord | None,
    ) -> VersionRecord:
        """Make an edit of `snapshot` the document's newest version, writing the M new rows only.

        `source` [N] names each kept row's place in the snapshot (-1: none), `positions` [M] ascending the new
        rows' places, `keys` and `values` [L, H, M, D] their contents, `token_ids` [N] the whole new document.
        Where `should_fold`, all rows go into a new base instead. Errors as in `commit_base`; ModelMismatchError
        for another model's snapshot; ValueError if rows, tokens and shapes do not fit together.
        """
        with self._commit("commit") as commit:
            new = NewRows(token_ids, source, positions, keys, values)
            return commit.patch(Proposal(document, key, debt, report, expect), snapshot, new)

    def try_write(self, document: Document, cache: KVCache) -> int:
        """Write a whole cache durably, as a new base would be, and drop it: the time a rebuild would take.

        The number of bytes written. Record and transaction are left out.
        """
        self._check_writable()
        return try_base(self._layout, document, cache)

    should_fold = staticmethod(should_fold)

    def compact(self, record: VersionRecord) -> VersionRecord:
        """Fold a head's patches into one base, under the same version number; a record without patches is returned."""
        if record.num_patches == 0:
            return record
        with self.writing("compact", self._busy_s):
            snapshot, key = self.snapshot(record), self.model(record.model)
            if key is None:
                raise DamagedFileError(self._layout.model(record.model), "it is missing")
            cache = align.folded(snapshot.rows, snapshot.segments, snapshot.token_ids)
            document = Document(record.corpus, record.doc_id, snapshot.text, record.text_sha256)
            report = self.detail(record).report | {"last_mr": record.last_mr}
            return self.commit_base(document, key, cache, record.debt, report, record, fold=True)

    def remove(self, corpus: str, doc_id: str) -> VersionRecord:
        """Replace the document's head by a tombstone, which is returned. UnknownDocumentError if there is none."""
        with self._commit("remove") as commit:
            head = self.head(corpus, doc_id)
            if head is None:
                raise UnknownDocumentError(f"The store does not know {doc_id}.")
            return commit.remove(head)

    def restore(self, head: VersionRecord) -> VersionRecord:
        """Make the content of the version before a head the newest version, under the next number.

        UsageError if that version is no longer kept, StoreDamagedError if it is not whole; StoreBusyError if the head
        is another by now.
        """
        with self._commit("restore") as commit:
            check_expected(self.head(head.corpus, head.doc_id), Change(head, (), head))
            before = self.restorable(head)
            self.snapshot(before, check=True)
            return commit.restore(head, self.detail(before))

    def restorable(self, head: VersionRecord) -> VersionRecord:
        """The version that `restore` would bring back; UsageError if none is kept."""
        before = self.previous(head)
        if before is None:
            raise UsageError(
                f"{head.doc_id}: no version before version {head.version} is kept, so there is none to go back to "
                "(--keep says how many a change leaves)"
            )
        return before

    def relink(self, record: VersionRecord, document: Document, keep_old: bool = False) -> VersionRecord:
        """Give a head's segments to a new document of the same text, and remove the old one unless it is kept."""
        if document.sha256 != record.text_sha256:
            raise ValueError(f"{document.doc_id} has another text than {record.doc_id}")
        with self._commit("relink") as commit:
            return commit.relink(self.detail(record), document, keep_old)

    # models and gates

    def save_model(self, key: ModelKey) -> None:
        """Store the whole key under its fingerprint."""
        self._check_writable()
        models.save_model(self._layout, key)
        self._manifest.remember(schema.models, fingerprint=key.fingerprint)

    def model(self, fingerprint: str) -> ModelKey | None:
        return models.load_model(self._layout, fingerprint)

    def save_gate(self, fingerprint: str, backend: str, report: dict[str, Any]) -> None:
        """Store a model's gate report for one backend over the one before it."""
        self._check_writable()
        models.save_gate(self._layout, fingerprint, backend, report)
        self._manifest.remember(schema.gates, fingerprint=fingerprint, backend=backend)

    def gate(self, fingerprint: str, backend: str) -> dict[str, Any] | None:
        return models.load_gate(self._layout, fingerprint, backend)

    def gates(self) -> list[tuple[str, str]]:
        """The fingerprint and backend of every gate report."""
        return self._manifest.gates()

    # what a pass with a time budget has left

    def left(self, corpus: str) -> list[str]:
        """The doc_ids that the last pass over a corpus had no time for, in order; lost where the manifest is."""
        try:
            found = json.loads(self._manifest.note(f"left:{corpus}") or "[]")
        except ValueError:
            return []
        return [doc_id for doc_id in found if isinstance(doc_id, str)] if isinstance(found, list) else []

    def set_left(self, corpus: str, doc_ids: Sequence[str]) -> None:
        """Remember what a pass has left, durably."""
        with self.writing("sync", self._busy_s):
            self._manifest.set_note(f"left:{corpus}", json.dumps(list(doc_ids)) if doc_ids else None)

    # upkeep

    def gc(self, min_age_s: float = garbage.MIN_AGE_S, max_bytes: int | None = None, dry_run: bool = False) -> GcReport:
        """Remove files that nothing refers to and that are older than `min_age_s`.

        Also previous versions beyond the `keep` that the store was opened with, and, where segments and records take
        more than `max_bytes`, further ones until they do not, the oldest first. Heads stay, whatever they take.
        """
        sweep = garbage.Sweep(min_age_s, self._manifest.given_keep, max_bytes, dry_run)
        if dry_run:
            return garbage.collect(self._layout, self._manifest, sweep)
        with self.writing("gc", self._busy_s):
            return garbage.collect(self._layout, self._manifest, sweep)

    def stored_bytes(self) -> int:
        """What all segment and record files take, unreferenced ones included."""
        return garbage.stored_bytes(self._layout)

    @staticmethod
    def rebuild(path: str | Path, dry_run: bool = False, timeout: float = 0.0) -> Rebuilt:
        """Replace the manifest of the store at `path`, in whatever state it is, by one made of the version records.

        `dry_run` only says what it would hold. See `kvfix.store.rebuild` for which versions are taken.
        """
        return rebuild.rebuild(Path(path), dry_run=dry_run, timeout_s=timeout)

    def unlisted(self) -> list[VersionRecord]:
        """Whole records of newer versions than the manifest knows: interrupted commits, or entries it has lost."""
        return rebuild.unlisted(self._layout, self._manifest)

    def verify(self, records: Sequence[VersionRecord] | None = None) -> list[Damage]:
        """Read everything, or what some versions need, and list every file that is not as it was written."""
        return audit.Audit(self._layout, self._manifest).run(records)

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreNotWritableError(f"The store {self.path} is open for reading only.")


def _removed(record: VersionRecord) -> UnknownDocumentError:
    return UnknownDocumentError(f"{record.doc_id} has been removed from the store.")


def _missing(record: VersionRecord, error: FileNotFoundError) -> DamagedFileError:
    return DamagedFileError(Path(error.filename), f"it is missing, and {record.doc_id} needs it")
