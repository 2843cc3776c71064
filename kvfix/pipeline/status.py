"""Status: every stored document beside its file; reads no cache and imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.corpus import read_document
from kvfix.errors import DocumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

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
            "stale_rows": record.debt.stale_rows,
            "edits_behind": record.debt.edits_behind,
            "last_mr": record.last_mr,
            "cache_bytes": record.cache_bytes,
            "stored_bytes": record.stored_bytes,
        }


def document_status(record: VersionRecord) -> DocumentStatus:
    """The record's state: its own, unless its file says otherwise."""
    path = Path(record.corpus) / record.doc_id
    if not path.is_file():
        return DocumentStatus(record, "missing")
    return DocumentStatus(record, _state(record, path))


def _state(record: VersionRecord, path: Path) -> str:
    try:
        document = read_document(path, record.corpus)
    except DocumentError:
        return "stale"
    return record.debt.state if document.sha256 == record.text_sha256 else "stale"


def statuses(records: Iterable[VersionRecord]) -> list[DocumentStatus]:
    """The state of every record."""
    return [document_status(record) for record in records]


def totals(found: list[DocumentStatus]) -> dict[str, Any]:
    """Counts by state and sums."""
    states = ("exact", "repaired", "stale", "missing")
    return {
        "documents": len(found),
        **{state: sum(status.state == state for status in found) for state in states},
        "num_tokens": sum(status.record.num_tokens for status in found),
        "stale_rows": sum(status.record.debt.stale_rows for status in found),
        "cache_bytes": sum(status.record.cache_bytes for status in found),
        "stored_bytes": sum(status.record.stored_bytes for status in found),
    }
