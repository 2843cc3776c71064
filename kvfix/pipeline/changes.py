"""What has changed in a corpus since it was cached, told from its texts alone: imports no torch, keeps no text.

Every file is read and hashed. Remembered sizes and times would be quicker on large corpora, and would overlook a file
whose content was replaced and whose times were put back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvfix.config import DEFAULT_INCLUDE, DEFAULT_MAX_BYTES
from kvfix.core import Document
from kvfix.corpus import Skipped, UnreadableError, read_document, resolve_corpus, scan
from kvfix.errors import UsageError

if TYPE_CHECKING:
    from kvfix.store import Store, VersionRecord

Key = tuple[str, str]  # corpus, doc_id

UNCHANGED = "the text is the one that is cached"


@dataclass(frozen=True)
class Walk:
    """Which files of a directory are documents."""

    include: tuple[str, ...] = DEFAULT_INCLUDE
    exclude: tuple[str, ...] = ()
    max_bytes: int = DEFAULT_MAX_BYTES


@dataclass(frozen=True)
class Source:
    """Documents of one corpus, read as they are asked for."""

    corpus: str
    documents: Iterator[Document | Skipped]
    whole: bool  # the corpus itself and not one file of it: what is not there is gone


@dataclass(frozen=True)
class Finding:
    """One document, and what a pass will have to do about it."""

    corpus: str
    doc_id: str
    kind: str  # new, changed, unchanged, skipped (unreadable), renamed, gone
    reason: str | None = None
    record: VersionRecord | None = None  # its head; of a renamed one, the head under its old name
    sha256: str | None = None
    num_chars: int = 0

    @property
    def key(self) -> Key:
        return self.corpus, self.doc_id


def source_at(path: str | os.PathLike[str], store: Store | None, walk: Walk, allow_empty: bool = False) -> Source:
    """The documents of the directory or the file at `path`.

    Raises `UsageError` for a directory that is missing, cannot be listed or holds no document; where the store knows
    it, `allow_empty` takes that for the truth.
    """
    known = store.corpora() if store else []
    if os.path.lexists(path) and not os.path.isdir(path):
        corpus = resolve_corpus(path, known)
        return Source(corpus, iter([_read(path, corpus, walk)]), whole=False)
    corpus = os.path.realpath(path)
    try:
        return Source(corpus, scan(path, walk.include, walk.exclude, walk.max_bytes), whole=True)
    except UsageError as error:
        if store is None or corpus not in known:
            raise
        if allow_empty:
            return Source(corpus, iter(()), whole=True)
        number = len(store.documents(corpus))
        raise UsageError(
            f"{error.message}; the store knows {number} of its documents, and nothing was done about them "
            "(--allow-empty takes them for removed)"
        ) from error


def look(store: Store | None, sources: Iterable[Source]) -> list[Finding]:
    """What every document of the sources needs, in the order of the walk; those that are gone stand last."""
    found: dict[Key, Finding] = {}
    gone: dict[Key, Finding] = {}
    for source in sources:
        heads = {record.doc_id: record for record in store.documents(source.corpus)} if store else {}
        for document in source.documents:
            finding = _finding(source.corpus, document, heads.get(document.doc_id))
            found[finding.key] = finding
        if source.whole:
            folders = (f.doc_id for f in found.values() if f.corpus == source.corpus and f.doc_id.endswith("/"))
            unseen = tuple(folders)
            for doc_id, record in heads.items():
                key = (source.corpus, doc_id)
                if key not in found and not doc_id.startswith(unseen) and _is_gone(*key):
                    gone[key] = Finding(*key, "gone", "its file is gone", record, record.text_sha256)
    return [*_renamed(found.values(), gone), *gone.values()]


def _read(path: str | os.PathLike[str], corpus: str, walk: Walk) -> Document | Skipped:
    try:
        return read_document(path, corpus, walk.max_bytes)
    except UnreadableError as error:
        return Skipped(os.path.relpath(os.path.abspath(path), corpus).replace(os.sep, "/"), error.reason)


def _finding(corpus: str, document: Document | Skipped, head: VersionRecord | None) -> Finding:
    if isinstance(document, Skipped):
        return Finding(corpus, document.doc_id, "skipped", document.reason, head)
    if head is not None and head.text_sha256 == document.sha256:
        return Finding(corpus, document.doc_id, "unchanged", UNCHANGED, head, document.sha256)
    kind = "new" if head is None else "changed"
    return Finding(corpus, document.doc_id, kind, kind, head, document.sha256, len(document.text))


def _is_gone(corpus: str, doc_id: str) -> bool:
    """Whether there is nothing under this name; what cannot be looked at may be there."""
    try:
        os.lstat(os.path.join(corpus, doc_id))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _renamed(found: Iterable[Finding], gone: dict[Key, Finding]) -> Iterator[Finding]:
    """The findings; a new document with the text of one that is gone is that one, which is taken out of `gone`."""
    by_text: dict[str | None, list[Finding]] = {}
    for old in gone.values():
        by_text.setdefault(old.sha256, []).append(old)
    for finding in found:
        if finding.kind == "new" and by_text.get(finding.sha256):
            old = by_text[finding.sha256].pop(0)
            del gone[old.key]
            yield replace(finding, kind="renamed", reason=f"it was {old.doc_id}", record=old.record)
        else:
            yield finding
