"""Status: every stored document beside its file; reads no cache and imports no torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfix.corpus import read_document
from kvfix.errors import DocumentError

if TYPE_CHECKING:
    from kvfix.store import VersionRecord


@dataclass(frozen=True)
class DocumentStatus:
    """One line of the table."""

    record: VersionRecord
    state: str  # exact, repaired, stale (its file has changed) or missing (its file is gone)

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "doc": record.doc_id,
            "corpus": record.corpus,
            "num_tokens": record.num_tokens,
            "state": self.state,
            "version": record.version,
            "stale_rows": record.stale_rows,
            "edits_behind": record.edits_behind,
            "last_mr": record.last_mr,
            "cache_bytes": record.cache_bytes,
            "stored_bytes": record.stored_bytes,
        }


def statuses(records: Iterable[VersionRecord]) -> list[DocumentStatus]:
    """The state of every record: its own, unless its file says otherwise."""
    # a few directories hold many documents
    real = functools.cache(os.path.realpath)
    return [DocumentStatus(record, _state(record, real)) for record in records]


def document_status(record: VersionRecord) -> DocumentStatus:
    """The state of one record."""
    return statuses([record])[0]


def _state(record: VersionRecord, real: Callable[[str], str]) -> str:
    path = os.path.join(record.corpus, record.doc_id)
    try:
        document = read_document(path, record.corpus, real=real)
    except DocumentError:
        return "stale" if os.path.isfile(path) else "missing"
    return record.state if document.sha256 == record.text_sha256 else "stale"


def totals(found: list[DocumentStatus]) -> dict[str, Any]:
    """Counts by state and sums."""
    states = ("exact", "repaired", "stale", "missing")
    return {
        "documents": len(found),
        **{state: sum(status.state == state for status in found) for state in states},
        "num_tokens": sum(status.record.num_tokens for status in found),
        "stale_rows": sum(status.record.stale_rows for status in found),
        "cache_bytes": sum(status.record.cache_bytes for status in found),
        "stored_bytes": sum(status.record.stored_bytes for status in found),
    }
