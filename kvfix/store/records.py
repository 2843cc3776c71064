"""What is written down about one version of one document: its row in the manifest and its record file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.core import Debt
from kvfix.errors import StoreDamagedError
from kvfix.store import jsonfile
from kvfix.store.damage import DamagedFileError
from kvfix.store.layout import is_digest

if TYPE_CHECKING:
    import numpy as np

    from kvfix.core import Document

FORMAT = "kvfix.record/1"
FOLD_NUM_PATCHES = 8


@dataclass(frozen=True)
class SegmentRef:
    """A segment as a record names it."""

    name: str  # sha256 of the file's content
    kind: str  # "base" or "patch"
    size: int  # bytes of the file
    num_rows: int
    checksums: dict[str, str]  # sha256 of each tensor's bytes


@dataclass(frozen=True)
class VersionRecord:
    """One version of one document, as the manifest's row tells it."""

    corpus: str
    doc_id: str
    version: int
    record_id: str  # sha256 of the record file
    parent: str | None  # record_id of the version before
    kind: str  # "base", "patch", "empty" or "tombstone"
    created_at: str  # ISO 8601, UTC
    model: str  # fingerprint
    num_tokens: int  # prefix included
    num_prefix: int
    text_sha256: str  # of the UTF-8 text
    token_sha256: str  # of the int64 token ids
    exact_until: int
    behind: str  # JSON runs of Debt.behind
    stale_rows: int
    edits_behind: int
    last_mr: float | None
    row_bytes: int  # bytes of one token in all layers, keys and values
    base_rows: int
    patch_rows: int
    num_patches: int
    stored_bytes: int  # all segments
    written_bytes: int  # what this commit wrote: its segment and its record

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache in memory."""
        return self.num_tokens * self.row_bytes

    @property
    def debt(self) -> Debt:
        try:
            runs = tuple((int(edits), int(rows)) for edits, rows in json.loads(self.behind))
        except (ValueError, TypeError) as error:
            raise StoreDamagedError(f"The manifest's row of {self.doc_id} is damaged. Run: kvfix verify") from error
        return Debt(self.exact_until, self.num_tokens, runs)

    @property
    def state(self) -> str:
        return "exact" if self.stale_rows == 0 else "repaired"


@dataclass(frozen=True)
class Detail:
    """Everything a record file holds."""

    record: VersionRecord
    segments: tuple[SegmentRef, ...]
    report: dict[str, Any]
    text: str | None  # kept here where no segment keeps it


def should_fold(record: VersionRecord, num_new_rows: int) -> bool:
    """Whether a new base is better than one more patch: more than 8 of them, or more rows than the base has.

    A first patch never folds, so that even a suffix that is computed anew writes its own rows only.
    """
    if record.num_patches == 0:
        return record.base_rows == 0
    return record.num_patches + 1 > FOLD_NUM_PATCHES or record.patch_rows + num_new_rows > record.base_rows


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def token_sha256(token_ids: np.ndarray) -> str:
    """The checksum of token ids `[N]`, as little-endian int64."""
    return hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()


def draft(document: Document, token_ids: np.ndarray, debt: Debt, report: dict[str, Any]) -> VersionRecord:
    """A record of `document`'s text, tokens and debt; what the store decides is still blank."""
    quality = report.get("quality") or {}
    return VersionRecord(
        corpus=document.corpus,
        doc_id=document.doc_id,
        version=1,
        record_id="",
        parent=None,
        kind="empty",
        created_at=now(),
        model="",
        num_tokens=len(token_ids),
        num_prefix=0,
        text_sha256=document.sha256,
        token_sha256=token_sha256(token_ids),
        exact_until=int(debt.exact_until),
        behind=json.dumps(jsonfile.plain(debt.behind), separators=(",", ":")),
        stale_rows=int(debt.stale_rows),
        edits_behind=int(debt.edits_behind),
        last_mr=jsonfile.plain(report.get("last_mr", quality.get("mr_median"))),
        row_bytes=0,
        base_rows=0,
        patch_rows=0,
        num_patches=0,
        stored_bytes=0,
        written_bytes=0,
    )


def with_segments(record: VersionRecord, segments: tuple[SegmentRef, ...]) -> VersionRecord:
    """The record of a version that is made of `segments`."""
    patches = segments[1:]
    return replace(
        record,
        kind=segments[-1].kind if segments else record.kind,
        base_rows=segments[0].num_rows if segments else 0,
        patch_rows=sum(patch.num_rows for patch in patches),
        num_patches=len(patches),
        stored_bytes=sum(segment.size for segment in segments),
    )


def encode(detail: Detail) -> tuple[VersionRecord, bytes]:
    """The record file's bytes, and the record with its name and size entered.

    Going in, `written_bytes` counts the segment alone.
    """
    body = asdict(detail.record)
    del body["record_id"]
    body |= {
        "format": FORMAT,
        "segments": [asdict(segment) for segment in detail.segments],
        "report": jsonfile.plain(detail.report),
        "text": detail.text,
    }
    content = jsonfile.encode(body)
    name = hashlib.sha256(content).hexdigest()
    written = detail.record.written_bytes + len(content)
    return replace(detail.record, record_id=name, written_bytes=written), content


def decode(content: bytes, path: Path) -> Detail:
    """What a record file says; StoreDamagedError if its content is not what its name promises."""
    name = hashlib.sha256(content).hexdigest()
    if name != path.stem:
        raise DamagedFileError(path, "its checksum differs")
    body = jsonfile.decode(content, path)
    try:
        if body["format"] != FORMAT:
            raise StoreDamagedError(f"{path} has the unknown format {body['format']!r}: a newer kvfix wrote it.")
        row = {field.name: body[field.name] for field in fields(VersionRecord) if field.name != "record_id"}
        row["written_bytes"] += len(content)
        segments = tuple(SegmentRef(**segment) for segment in body["segments"])
        if not all(is_digest(segment.name) for segment in segments):
            raise ValueError("a segment's name")
        return Detail(VersionRecord(record_id=name, **row), segments, body["report"], body["text"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(path, f"it is no version record ({error})") from error
