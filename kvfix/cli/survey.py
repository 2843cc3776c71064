"""What a build will find: each document's outcome told from its text alone, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.api import documents_at
from kvfix.corpus import Skipped

if TYPE_CHECKING:
    from kvfix.config import Settings
    from kvfix.core import Document
    from kvfix.store import Store, VersionRecord


@dataclass(frozen=True)
class Line:
    """What became, or would become, of one document."""

    corpus: str
    doc_id: str
    outcome: str  # built, planned, unchanged, skipped
    reason: str | None = None
    record: VersionRecord | None = None
    timing_ms: dict[str, float] = field(default_factory=dict)
    num_chars: int = 0

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "doc": self.doc_id,
            "corpus": self.corpus,
            "outcome": self.outcome,
            "reason": self.reason,
            "num_tokens": record.num_tokens if record else None,
            "version": record.version if record else None,
            "cache_bytes": record.cache_bytes if record else None,
            "stored_bytes": record.stored_bytes if record else None,
            "timing_ms": self.timing_ms,
        }


def patterns(settings: Settings) -> dict[str, Any]:
    """Which files a walk takes, as `documents_at` and `KVFix.build` are told."""
    return {"include": settings.include, "exclude": settings.exclude, "max_bytes": settings.max_bytes}


def require_documents(settings: Settings, paths: Sequence[Path]) -> None:
    """Raise `UsageError` for a path where there is nothing to read."""
    for path in paths:
        documents_at(path, (), **patterns(settings))


def survey(store: Store | None, settings: Settings, paths: Sequence[Path], force: bool) -> Iterator[Line]:
    """Every document below the paths, read one by one."""
    for path in paths:
        corpus, documents = documents_at(path, store.corpora() if store else (), **patterns(settings))
        for document in documents:
            yield _line(store, corpus, document, force)


def _line(store: Store | None, corpus: str, document: Document | Skipped, force: bool) -> Line:
    if isinstance(document, Skipped):
        return Line(corpus, document.doc_id, "skipped", document.reason)
    head = store.head(corpus, document.doc_id) if store else None
    if head is not None and head.text_sha256 == document.sha256 and not force:
        return Line(corpus, document.doc_id, "unchanged", "the text is the one that is cached", head)
    reason = "new" if head is None else "forced" if head.text_sha256 == document.sha256 else "changed"
    return Line(corpus, document.doc_id, "planned", reason, num_chars=len(document.text))


def totals(lines: Sequence[Line]) -> dict[str, int]:
    """Counts by outcome, and sums over all documents that have a cache."""
    records = [line.record for line in lines if line.record]
    return {
        "documents": len(lines),
        **{name: sum(line.outcome == name for line in lines) for name in ("built", "planned", "unchanged", "skipped")},
        "num_tokens": sum(record.num_tokens for record in records),
        "cache_bytes": sum(record.cache_bytes for record in records),
        "stored_bytes": sum(record.stored_bytes for record in records),
    }
