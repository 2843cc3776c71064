"""Exact caches by text: a new document of the same text needs none of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfix.core import Document
    from kvfix.store import Store, VersionRecord


class Twins:
    """What is known of one model's texts in a store, and of those that a pass is about to add."""

    def __init__(self, store: Store, model: str) -> None:
        self._store, self._model = store, model
        self._records: dict[str, VersionRecord] = {}
        self._expected: set[str] = set()

    def remember(self, record: VersionRecord) -> None:
        """A version that stands now."""
        if record.stale_rows == 0 and record.num_tokens and record.model == self._model:
            self._records[record.text_sha256] = record

    def expect(self, document: Document) -> None:
        """A document that is being built."""
        self._expected.add(document.sha256)

    def may_have(self, document: Document) -> bool:
        """Whether there is, or will be, a cache of this text."""
        return document.sha256 in self._records or document.sha256 in self._expected

    def find(self, document: Document) -> VersionRecord | None:
        """The head of another document with this text and an exact cache; to be asked when no commit is under way."""
        twin = self._records.get(document.sha256)
        head = self._store.head(twin.corpus, twin.doc_id) if twin else None
        return head if twin and head and head.record_id == twin.record_id else None
