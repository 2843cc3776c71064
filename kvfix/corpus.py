"""Documents on disk: found in one order, read whole or passed over with a reason, never from outside the corpus."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from kvfix.config import DEFAULT_INCLUDE, DEFAULT_MAX_BYTES
from kvfix.core import Document
from kvfix.errors import DocumentError, UnknownDocumentError, UsageError

LEADS_OUT = "a symlink that leads out of the corpus"
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Skipped:
    """A document that cannot be read, or - its `doc_id` ends in a slash - a directory that cannot be walked."""

    doc_id: str
    reason: str


class UnreadableError(DocumentError):
    """The document cannot be read."""

    def __init__(self, doc_id: str, reason: str) -> None:
        super().__init__(f"{doc_id}: {reason}")
        self.reason = reason


def read_document(
    path: str | os.PathLike[str],
    corpus: str,
    max_bytes: int = DEFAULT_MAX_BYTES,
    real: Callable[[str], str] = os.path.realpath,
) -> Document:
    """Read one document as UTF-8, a leading byte order mark left out, line ends kept.

    A symlink is a document of its own, under its own path, if it leads to a file inside the corpus. Raises
    DocumentError for what is not a regular file, not complete UTF-8, holds a NUL byte, is larger than `max_bytes`,
    leads out of the corpus, or changes under two readings. Whoever reads many may remember the `real` paths of their
    directories.
    """
    corpus, own_path = real(corpus), _own_path(path, real)
    if not _is_inside(own_path, corpus):
        raise UnreadableError(_printable(own_path), f"is outside the corpus {_printable(corpus)}")
    return _read(corpus, os.path.relpath(own_path, corpus), max_bytes)


def document_of(corpus: str, doc_id: str, text: str | bytes) -> Document:
    """A document whose text comes from elsewhere; bytes are decoded as a file's are. Raises DocumentError likewise."""
    decoded = _decode(text, doc_id) if isinstance(text, bytes) else text
    try:
        encoded = decoded.encode()
    except UnicodeEncodeError as error:
        raise UnreadableError(doc_id, f"half a surrogate pair at character {error.start}") from error
    return Document(corpus, doc_id, decoded, hashlib.sha256(encoded).hexdigest())


def scan(
    path: str | os.PathLike[str],
    include: Sequence[str] = DEFAULT_INCLUDE,
    exclude: Sequence[str] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[Document | Skipped]:
    """The documents of the corpus at directory `path`, read one by one as they are asked for, ordered by path.

    Patterns without a slash match names, others whole paths below the corpus (`*` crosses slashes), upper and lower
    case alike; an excluded directory is not entered. Hidden files and directories are no documents. Links to
    directories are not followed: what they hold inside the corpus has a path of its own. Raises UsageError for a
    directory that is missing, cannot be listed or holds no document.
    """
    corpus = _corpus_of(os.path.realpath(path))
    if not os.path.isdir(corpus):
        raise UsageError(f"{path}: {'not a directory' if os.path.exists(corpus) else 'no such directory'}")
    try:
        os.listdir(corpus)
    except OSError as error:
        raise UsageError(f"{path}: cannot be listed: {error.strerror}") from error
    found = _scan(corpus, include, exclude, max_bytes)
    first = next(found, None)
    if first is None:
        raise UsageError(f"{path}: no documents here (looked for {', '.join(include)})")
    return chain((first,), found)


def resolve_corpus(path: str | os.PathLike[str], known_corpora: Iterable[str]) -> str:
    """The corpus that `path` belongs to: a directory is its own; a file's is the nearest known above it, or its parent.

    Raises UsageError where there is nothing at `path`.
    """
    if not os.path.lexists(path):
        raise UsageError(f"{path}: no such file or directory")
    if os.path.isdir(path):
        return _corpus_of(os.path.realpath(path))
    parent = os.path.dirname(_own_path(path))
    above = [corpus for corpus in known_corpora if _is_inside(parent, corpus)]
    return max(above, key=len, default=_corpus_of(parent))


def find_document(arg: str, known: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The known (corpus, doc_id) that `arg` names, by path or by a doc_id that only one corpus has.

    Raises UnknownDocumentError, which lists what may have been meant.
    """
    path = _own_path(arg)
    by_path = [key for key in known if os.path.join(*key) == path]
    if by_path:
        return max(by_path, key=lambda key: len(key[0]))
    above = [corpus for corpus, _ in known if _is_inside(path, corpus)]
    if above and os.path.lexists(path):
        raise UnknownDocumentError(f"{arg}: never built; run: kvfix build {max(above, key=len)}")
    doc_id = os.path.normpath(arg).replace(os.sep, "/")
    same = [key for key in known if key[1] == doc_id]
    if len(same) > 1:
        paths = ", ".join(sorted(os.path.join(*key) for key in same))
        raise UnknownDocumentError(f"{arg}: {len(same)} corpora have this document; name one by its path: {paths}")
    if not same:
        raise UnknownDocumentError(_not_found(arg, doc_id, known))
    return same[0]


def _not_found(arg: str, doc_id: str, known: Sequence[tuple[str, str]]) -> str:
    if not known:
        return f"{arg}: the store has no documents yet; run: kvfix build PATH"
    from rapidfuzz import fuzz, process

    doc_ids = sorted({doc_id for _, doc_id in known})
    near = process.extract(doc_id, doc_ids, scorer=fuzz.WRatio, score_cutoff=70, limit=5)
    hint = f" Close: {', '.join(match[0] for match in near)}." if near else ""
    return f"{arg}: no such document in the store.{hint} kvfix status lists all; kvfix build PATH adds one."


def _scan(corpus: str, include: Sequence[str], exclude: Sequence[str], max_bytes: int) -> Iterator[Document | Skipped]:
    pending = [("", True)]
    while pending:
        relative, is_directory = pending.pop()
        try:
            if is_directory:
                pending += _children(corpus, relative, exclude)
            elif os.path.isdir(os.path.join(corpus, relative)):
                if not _is_inside(os.path.realpath(os.path.join(corpus, relative)), corpus):
                    yield Skipped(f"{_printable(relative)}/", LEADS_OUT)
            elif _matches(relative, include):
                yield _read(corpus, relative, max_bytes)
        except UnreadableError as error:
            yield Skipped(_printable(relative), error.reason)
        except OSError as error:
            yield Skipped(f"{_printable(relative)}/", f"cannot be listed: {error.strerror}")


def _children(corpus: str, directory: str, exclude: Sequence[str]) -> list[tuple[str, bool]]:
    """Paths below the corpus, last first, and whether each is a directory itself."""
    with os.scandir(os.path.join(corpus, directory)) as entries:
        found = [(os.path.join(directory, entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
    visible = [child for child in found if not os.path.basename(child[0]).startswith(".")]
    return sorted((child for child in visible if not _matches(child[0], exclude)), reverse=True)


def _matches(relative: str, patterns: Sequence[str]) -> bool:
    path = relative.replace(os.sep, "/").lower()
    name = path.rsplit("/", 1)[-1]
    return any(
        fnmatchcase(path if "/" in pattern else name, pattern)
        for given in patterns
        # "**/x" also means the x at the top
        for pattern in {given.lower().strip("/"), given.lower().strip("/").removeprefix("**/")}
    )


def _read(corpus: str, relative: str, max_bytes: int) -> Document:
    doc_id = relative.replace(os.sep, "/")
    if _printable(doc_id) != doc_id:
        raise UnreadableError(_printable(doc_id), "its name is not UTF-8")
    # the directory is a real one: only the last name can be a link
    target = os.path.join(corpus, relative)
    try:
        # checked before opening: a device may act when it is opened
        mode = os.lstat(target).st_mode
        if stat.S_ISLNK(mode):
            target = os.path.realpath(target)
            mode = os.lstat(target).st_mode
        if not _is_inside(target, corpus):
            raise UnreadableError(doc_id, LEADS_OUT)
        if not stat.S_ISREG(mode):
            raise UnreadableError(doc_id, f"not a regular file ({_kind(mode)})")
        data = _read_unchanged(target, doc_id, max_bytes)
    except OSError as error:
        broken = isinstance(error, FileNotFoundError) and os.path.islink(os.path.join(corpus, relative))
        raise UnreadableError(doc_id, "a broken symlink" if broken else f"cannot be read: {error.strerror}") from error
    return document_of(corpus, doc_id, _decode(data, doc_id))


def _read_unchanged(path: str, doc_id: str, max_bytes: int) -> bytes:
    """The bytes of a file that stayed the same while it was read, at the second try if need be."""
    for _ in range(2):
        # neither a link nor a pipe put there meanwhile is followed or waited for
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            before = os.fstat(file.fileno())
            if before.st_size > max_bytes:
                raise UnreadableError(doc_id, f"{before.st_size} bytes; the limit (max_bytes) is {max_bytes}")
            # one byte more than there should be: a file that grows is noticed
            data = file.read(before.st_size + 1)
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns) and len(data) == after.st_size:
            return data
    raise UnreadableError(doc_id, "it changed while it was read, twice")


def _decode(data: bytes, doc_id: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"(0x{data[error.start]:02x})"
        raise UnreadableError(doc_id, f"not UTF-8 at byte {error.start} {byte}: {error.reason}") from error
    nul = data.find(b"\0")
    if nul >= 0:
        raise UnreadableError(doc_id, f"binary: a NUL byte at byte {nul}")
    return text[1:] if data.startswith(BOM) else text


def _own_path(path: str | os.PathLike[str], real: Callable[[str], str] = os.path.realpath) -> str:
    """The absolute path with every link resolved but the last name: a link is a document of its own."""
    parent, name = os.path.split(os.fspath(path).rstrip(os.sep))
    return os.path.realpath(path) if name in ("", ".", "..") else os.path.join(real(parent), name)


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(os.path.join(directory, ""))


def _corpus_of(directory: str) -> str:
    if _printable(directory) != directory:
        raise UsageError(f"{_printable(directory)}: the name of a corpus must be UTF-8")
    return directory


def _printable(name: str) -> str:
    """The name, with bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFLNK: "symlink loop"}
    return kinds.get(stat.S_IFMT(mode), "device")
