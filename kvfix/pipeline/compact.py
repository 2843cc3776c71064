"""Compact: fold the patches of documents into new bases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfix.errors import StoreDamagedError

if TYPE_CHECKING:
    from kvfix.store import Store, VersionRecord


@dataclass(frozen=True)
class Compacted:
    """What became of one document."""

    previous: VersionRecord
    outcome: str  # compacted, planned, unchanged, failed
    reason: str | None = None
    record: VersionRecord | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "doc": self.previous.doc_id,
            "corpus": self.previous.corpus,
            "outcome": self.outcome,
            "reason": self.reason,
            "version": self.previous.version,
            "num_patches": self.previous.num_patches,
            "before_bytes": self.previous.stored_bytes,
            "after_bytes": self.record.stored_bytes if self.record else None,
        }


def compact(store: Store, records: Iterable[VersionRecord], dry_run: bool = False) -> Iterator[Compacted]:
    """Fold the patches of each head, under its version number; what is damaged is reported and left as it is."""
    for record in records:
        if record.num_patches == 0:
            yield Compacted(record, "unchanged", "it has no patches", record)
        elif dry_run:
            yield Compacted(record, "planned", "dry run: nothing was written")
        else:
            yield _folded(store, record)


def _folded(store: Store, record: VersionRecord) -> Compacted:
    try:
        return Compacted(record, "compacted", None, store.compact(record))
    except StoreDamagedError as error:
        return Compacted(record, "failed", error.message)


def totals(done: list[Compacted]) -> dict[str, int]:
    """Counts by outcome."""
    outcomes = ("compacted", "planned", "unchanged", "failed")
    return {"documents": len(done), **{name: sum(one.outcome == name for one in done) for name in outcomes}}
