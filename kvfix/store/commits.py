"""How a new version comes to be: segment durable, record durable, then one transaction."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvfix import align
from kvfix.core import KVCache
from kvfix.errors import StoreBusyError
from kvfix.store import files, models, objects, records, segments
from kvfix.store.layout import Layout
from kvfix.store.manifest import Change, Garbage, Manifest, check_expected
from kvfix.store.newfiles import NewFiles
from kvfix.store.records import Detail, SegmentRef, VersionRecord, should_fold

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvfix.core import Debt, Document, ModelKey
    from kvfix.store.segments import NewRows
    from kvfix.store.snapshot import Snapshot


@dataclass(frozen=True)
class Proposal:
    """A version that is to become its document's head where the head is still `expect`."""

    document: Document
    key: ModelKey
    debt: Debt
    report: dict[str, Any]
    expect: VersionRecord | None
    replaces: bool = False


class Committer:
    """Writes versions into one store. The caller holds the writer lock."""

    def __init__(self, layout: Layout, manifest: Manifest, new: NewFiles) -> None:
        self._layout = layout
        self._manifest = manifest
        self._new = new

    def base(self, proposal: Proposal, cache: KVCache | None) -> VersionRecord:
        """Commit a whole cache, or an empty document where there is none."""
        if cache is None or len(cache) == 0:
            return self._empty(proposal)
        if not len(cache.origin) == len(cache) <= cache.capacity:
            raise ValueError(f"{len(cache.origin)} origins and {cache.capacity} rows for {len(cache)} tokens")
        draft = self._draft(proposal, cache.token_ids)
        keys, values = cache.keys[:, :, : len(cache)], cache.values[:, :, : len(cache)]
        segments.check_finite(keys, values)
        return self._new_base(proposal, draft, KVCache(keys, values, cache.token_ids, cache.origin))

    def patch(self, proposal: Proposal, snapshot: Snapshot, new: NewRows) -> VersionRecord:
        """Commit the new rows of an edit, as a patch or folded into a new base."""
        record = snapshot.record
        if proposal.expect is None or proposal.expect.record_id != record.record_id:
            raise StoreBusyError(f"{record.doc_id} was changed while it was read. Run the command again.")
        models.check_model(self._layout, record.model, proposal.key)
        segments.check_rows(new, snapshot)
        if len(new.token_ids) == 0:
            return self._empty(proposal)
        draft = self._draft(proposal, new.token_ids)
        segments.check_finite(new.keys, new.values)
        if should_fold(record, len(new.positions)):
            return self._new_base(proposal, draft, _folded(snapshot, new))
        tensors = segments.patch_tensors(new, proposal.document.text, snapshot.text)
        added = self._segment(tensors, "patch", len(new.positions))
        kept = tuple(segment.ref for segment in snapshot.segments)
        draft = replace(draft, row_bytes=record.row_bytes, written_bytes=added.size)
        return self._finish(proposal, draft, (*kept, added))

    def remove(self, head: VersionRecord) -> VersionRecord:
        """Commit a tombstone in the place of a head."""
        change = self._tombstone(head)
        self._commit([change], head.model)
        return change.record

    def restore(self, head: VersionRecord, detail: Detail) -> VersionRecord:
        """Commit what an earlier version holds as the version after the head."""
        record = replace(
            detail.record,
            version=head.version + 1,
            parent=head.record_id,
            created_at=records.now(),
            written_bytes=0,
        )
        change = self._change(replace(detail, record=record), head)
        self._commit([change], record.model)
        return change.record

    def relink(self, detail: Detail, document: Document, keep_old: bool) -> VersionRecord:
        """Commit a version's segments as the first version of another document of the same text."""
        old = detail.record
        record = replace(
            old,
            corpus=document.corpus,
            doc_id=document.doc_id,
            version=self._manifest.next_version(document.corpus, document.doc_id),
            parent=old.record_id,
            created_at=records.now(),
            written_bytes=0,
        )
        change = self._change(replace(detail, record=record), None)
        self._commit([change] if keep_old else [change, self._tombstone(old)], old.model)
        return change.record

    def _tombstone(self, head: VersionRecord) -> Change:
        record = replace(
            records.with_segments(head, ()),
            kind="tombstone",
            version=self._manifest.next_version(head.corpus, head.doc_id),
            parent=head.record_id,
            created_at=records.now(),
            written_bytes=0,
        )
        return self._change(Detail(record, (), {}, None), head)

    def _empty(self, proposal: Proposal) -> VersionRecord:
        import numpy as np

        return self._finish(proposal, self._draft(proposal, np.zeros(0, np.int64)), ())

    def _new_base(self, proposal: Proposal, draft: VersionRecord, cache: KVCache) -> VersionRecord:
        text = proposal.document.text
        tensors = segments.base_tensors(cache.keys, cache.values, cache.token_ids, cache.origin, text)
        base = self._segment(tensors, "base", len(cache))
        return self._finish(proposal, replace(draft, row_bytes=cache.row_bytes, written_bytes=base.size), (base,))

    def _segment(self, tensors: dict[str, torch.Tensor], kind: str, num_rows: int) -> SegmentRef:
        """A new segment, durable. A file of the same content is replaced, which mends it if it was damaged."""
        with objects.written(self._layout, tensors, kind, num_rows) as (file, segment):
            files.publish(self._layout, file, self._new.noted(self._layout.object(segment.name)))
        return segment

    def _draft(self, proposal: Proposal, token_ids: np.ndarray) -> VersionRecord:
        """The record as far as it is known before anything is written; what speaks against it is raised here."""
        document, expect = proposal.document, proposal.expect
        _check_facts(proposal, len(token_ids))
        draft = records.draft(document, token_ids, proposal.debt, proposal.report)
        head = self._manifest.head(document.corpus, document.doc_id)
        check_expected(head, Change(draft, (), expect))
        if expect is None:
            number, parent = self._manifest.next_version(document.corpus, document.doc_id), None
        elif proposal.replaces:
            number, parent = expect.version, expect.parent
        else:
            number, parent = expect.version + 1, expect.record_id
        key = proposal.key
        return replace(draft, version=number, parent=parent, model=key.fingerprint, num_prefix=len(key.prefix))

    def _finish(self, proposal: Proposal, draft: VersionRecord, refs: tuple[SegmentRef, ...]) -> VersionRecord:
        """Write the record of a version whose segments are durable, and commit it."""
        self.know_model(proposal.key)
        text = None if refs else proposal.document.text
        detail = Detail(records.with_segments(draft, refs), refs, proposal.report, text)
        change = replace(self._change(detail, proposal.expect), replaces=proposal.replaces)
        self._commit([change], proposal.key.fingerprint)
        return change.record

    def know_model(self, key: ModelKey) -> None:
        if not self._layout.model(key.fingerprint).exists():
            models.save_model(self._layout, key)

    def _change(self, detail: Detail, expect: VersionRecord | None) -> Change:
        """The change that a record stands for, its file durable."""
        record, content = records.encode(detail)
        files.write_bytes(self._layout, self._new.noted(self._layout.record(record.record_id)), content)
        return Change(record, tuple(segment.name for segment in detail.segments), expect)

    def _commit(self, changes: list[Change], fingerprint: str) -> None:
        """Make the changes true, then remove the files that they left without a reference."""
        self._remove(self._manifest.commit(changes, fingerprint))

    def _remove(self, garbage: Garbage) -> None:
        """Whoever has a file open keeps it, whoever is about to open it reads the head again; gc finds the rest."""
        paths = [self._layout.record(name) for name in garbage.records]
        paths += [self._layout.object(name) for name in garbage.segments]
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()


def try_base(layout: Layout, document: Document, cache: KVCache) -> int:
    """Write a whole cache durably and drop it again; the bytes it took."""
    keys, values = cache.keys[:, :, : len(cache)], cache.values[:, :, : len(cache)]
    segments.check_finite(keys, values)
    tensors = segments.base_tensors(keys, values, cache.token_ids, cache.origin, document.text)
    return objects.try_write(layout, tensors)


def _check_facts(proposal: Proposal, num_tokens: int) -> None:
    """Raise ValueError if text and checksum, or tokens and debt, do not belong together."""
    document = proposal.document
    if hashlib.sha256(document.text.encode()).hexdigest() != document.sha256:
        raise ValueError(f"the text of {document.doc_id} has another checksum")
    if proposal.debt.num_tokens != num_tokens:
        raise ValueError(f"a debt over {proposal.debt.num_tokens} tokens for {num_tokens} of them")


def _folded(snapshot: Snapshot, new: NewRows) -> KVCache:
    """The edited version's rows in order, keys as they were computed."""
    rows = snapshot.rows.realigned(new.source).overlaid(new.positions, len(snapshot.segments))
    return align.folded(rows, [*snapshot.segments, new], new.token_ids)
