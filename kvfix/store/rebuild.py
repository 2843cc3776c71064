"""A new manifest from the version records alone, and what of them can still be used."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from kvfix.errors import StoreDamagedError, StoreMissingError
from kvfix.store import files, garbage, jsonfile, models
from kvfix.store.audit import Audit, Damage, present
from kvfix.store.create import SET_ASIDE
from kvfix.store.damage import DamagedFileError
from kvfix.store.layout import DIRECTORIES, FINGERPRINT, Layout
from kvfix.store.lock import WriterLock
from kvfix.store.manifest import Change, Manifest
from kvfix.store.records import Detail, VersionRecord, decode

ROW_BYTES = 4096  # of the manifest, for each version at most


@dataclass(frozen=True)
class Loss:
    """A version that a record or the old manifest speaks of and that could not be used."""

    corpus: str | None
    doc: str | None  # None where the record cannot be read at all
    version: int | None
    restored: int | None  # the version that now stands in its place


@dataclass(frozen=True)
class Rebuilt:
    """What a new manifest holds, or would hold."""

    num_documents: int
    num_versions: int
    set_aside: str | None  # the old manifest's new name
    damages: list[Damage]  # files that were left out
    losses: list[Loss]


class Found(NamedTuple):
    """What the files of a store say."""

    versions: list[Detail]  # in ascending order by document
    fingerprints: list[str]
    backends: list[tuple[str, str]]
    damages: list[Damage]
    losses: list[Loss]


class _Named(NamedTuple):
    """Whose record a damaged file seems to be."""

    corpus: str | None
    doc_id: str | None
    version: int | None


def rebuild(path: Path, *, dry_run: bool = False, timeout_s: float = 0.0) -> Rebuilt:
    """Put a manifest made of the records in the place of the present one, which is kept beside it.

    Of each document the newest version becomes the head whose record and segments are whole; what is damaged is left
    where it is. A version whose commit was interrupted after its record was durable counts as committed. Raises
    StoreMissingError, StoreBusyError, StoreNotWritableError, and UsageError for a newer format.
    """
    layout = Layout(Path(path).absolute())
    if not all((layout.root / name).is_dir() for name in ("objects", "records")):
        raise StoreMissingError(f"There is no store at {layout.root}: it has no objects or no records.")
    if dry_run:
        return _report(_look(layout, _old(layout)), None)
    for name in DIRECTORIES:
        files.make_directory(layout.root / name)
    with WriterLock(layout).held("fsck", timeout_s):
        old = _old(layout)
        found = _look(layout, old)
        return _report(found, _replace(layout, found, old.kept))


def unlisted(layout: Layout, manifest: Manifest) -> list[VersionRecord]:
    """Whole records of versions newer than anything the manifest knows of their documents.

    Left by a commit that was interrupted, or lost by the manifest.
    """
    newest: dict[tuple[str, str], int] = {}
    for record in manifest.versions():
        newest[record.corpus, record.doc_id] = record.version
    found = []
    for path in garbage.unreferenced(layout, manifest):
        if path.suffix == ".json":
            with contextlib.suppress(StoreDamagedError, FileNotFoundError):
                record = _read(layout, path).record
                if record.kind != "tombstone" and record.version > newest.get((record.corpus, record.doc_id), 0):
                    found.append(record)
    return sorted(found, key=lambda record: (record.corpus, record.doc_id, record.version))


def _old(layout: Layout) -> Manifest:
    """The present manifest; its settings read as far as that goes."""
    manifest = Manifest(layout.manifest, read_only=True, busy_s=0.0)
    layout.refuse_symlinks(layout.manifest)
    with contextlib.suppress(StoreDamagedError):
        manifest.check_format()
    return manifest


def _read(layout: Layout, path: Path) -> Detail:
    return decode(files.read_bytes(layout, path), path)


def _look(layout: Layout, old: Manifest) -> Found:
    audit = Audit(layout, old)
    paths = [path for path in garbage.stored(layout) if path == layout.record(path.stem)]
    readable, unreadable = [], []
    for path in paths:
        detail = audit.attempt(path, _named(path), _read, layout, path)
        if detail is None:
            unreadable.append(path)
        else:
            readable.append(detail)
    whole = audit.whole(readable)
    chosen = [detail for chain in _by_document(whole) for detail in _history(chain)]
    losses = _losses(readable, unreadable, chosen, old)
    fingerprints = _fingerprints(layout, audit, chosen)
    backends = _backends(layout, audit)
    return Found(chosen, fingerprints, backends, audit.found, losses)


def _named(path: Path) -> Iterator[Any]:
    """Whose record a damaged file seems to be, if that can still be told."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        body = json.loads(path.read_bytes()[: files.MAX_SMALL_BYTES])
        corpus, doc_id, version = body["corpus"], body["doc_id"], body["version"]
        if isinstance(corpus, str) and isinstance(doc_id, str) and type(version) is int:
            yield _Named(corpus, doc_id, version)


def _by_document(details: Iterable[Detail]) -> list[list[Detail]]:
    found: dict[tuple[str, str], list[Detail]] = {}
    for detail in details:
        found.setdefault((detail.record.corpus, detail.record.doc_id), []).append(detail)
    return [found[key] for key in sorted(found)]


def _history(details: Sequence[Detail]) -> list[Detail]:
    """One document's versions in ascending order, one of each number; nothing stands behind a tombstone.

    Where several records have one number, the one that the version after it names, else the latest.
    """
    by_number: dict[int, list[Detail]] = {}
    for detail in sorted(details, key=lambda detail: (detail.record.created_at, detail.record.record_id)):
        by_number.setdefault(detail.record.version, []).append(detail)
    chain: list[Detail] = []
    for number in sorted(by_number, reverse=True):
        same = by_number[number]
        parent = chain[-1].record.parent if chain else None
        chain.append(next((detail for detail in same if detail.record.record_id == parent), same[-1]))
        if chain[-1].record.kind == "tombstone":
            break
    return chain[::-1]


def _losses(
    readable: Sequence[Detail], unreadable: Sequence[Path], chosen: Sequence[Detail], old: Manifest
) -> list[Loss]:
    """The newest version of each document of which something is left, where it could not be used."""
    tops = {(detail.record.corpus, detail.record.doc_id): detail.record for detail in chosen}
    parents = {detail.record.parent for detail in chosen}
    wanted: dict[tuple[str, str], int] = {}
    nameless = 0
    known: list[Any] = [detail.record for detail in readable]
    for path in unreadable:
        names = list(_named(path))
        # what a later version was made from is a previous version
        nameless += not names and path.stem not in parents
        known += names
    with contextlib.suppress(StoreDamagedError):
        known += old.heads(None)
    for one in known:
        key = (one.corpus, one.doc_id)
        if key not in tops or one.version > tops[key].version:
            wanted[key] = max(one.version, wanted.get(key, 0))
    losses = [Loss(None, None, None, None)] * nameless
    for (corpus, doc), version in sorted(wanted.items()):
        top = tops.get((corpus, doc))
        losses.append(Loss(corpus, doc, version, top.version if top and top.kind != "tombstone" else None))
    return losses


def _fingerprints(layout: Layout, audit: Audit, chosen: Sequence[Detail]) -> list[str]:
    """The models that are described, and those that a version names."""
    needed: dict[str, list[VersionRecord]] = {}
    for path in (layout.root / "models").glob("*.json"):
        if FINGERPRINT.fullmatch(path.stem):
            needed.setdefault(path.stem, [])
    for detail in chosen:
        needed.setdefault(detail.record.model, []).append(detail.record)
    for fingerprint, users in needed.items():
        path = layout.root / "models" / f"{fingerprint}.json"
        audit.attempt(path, users, present, models.load_model, layout, fingerprint)
    return sorted(needed)


def _backends(layout: Layout, audit: Audit) -> list[tuple[str, str]]:
    """What the gate reports that can be read are about."""
    found = []
    for path in sorted((layout.root / "gates").glob("*.json")):
        about = audit.attempt(path, [], _gate, layout, path)
        if about is not None:
            found.append(about)
    return found


def _gate(layout: Layout, path: Path) -> tuple[str, str]:
    body = present(jsonfile.load_sealed, layout, path)
    fingerprint, backend = str(body["fingerprint"]), str(body["backend"])
    if layout.gate(fingerprint, backend) != path:
        raise DamagedFileError(path, "it belongs to another model")
    return fingerprint, backend


def _replace(layout: Layout, found: Found, keep: int) -> str | None:
    """Write the new manifest durably and give it its name; the old one's new name."""
    files.need_space(layout.root, ROW_BYTES * (len(found.versions) + 16))
    with files.temporary(layout) as new:
        with files.while_writing(new):
            files.create(new)
        manifest = Manifest(new, read_only=False, busy_s=0.0)
        manifest.kept = keep
        manifest.create()
        manifest.fill(map(_change, found.versions), found.fingerprints, found.backends)
        manifest.database.close()
        with files.while_writing(new):
            files.sync_file(new)
        name = _set_aside(layout)
        files.publish(layout, new, layout.manifest)
    return name


def _change(detail: Detail) -> Change:
    return Change(detail.record, tuple(segment.name for segment in detail.segments), None)


def _set_aside(layout: Layout) -> str | None:
    """Give the present manifest a second name, and its journal another, which would be played into the new one."""
    manifest = layout.manifest
    name = f"{manifest.name}{SET_ASIDE}{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}"
    with files.while_writing(manifest):
        for suffix in ("-journal", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{manifest}{suffix}", layout.root / f"{name}{suffix}")
        if not os.path.lexists(manifest) or (manifest.is_file() and manifest.stat().st_size == 0):
            return None
        try:
            os.link(manifest, layout.root / name, follow_symlinks=False)
        except OSError:
            # a directory, or a file system without second names: for a moment there is no manifest
            os.rename(manifest, layout.root / name)
        files.sync_directory(layout.root)
    return name


def _report(found: Found, set_aside: str | None) -> Rebuilt:
    newest = {(detail.record.corpus, detail.record.doc_id): detail.record for detail in found.versions}
    heads = sum(record.kind != "tombstone" for record in newest.values())
    return Rebuilt(heads, len(found.versions), set_aside, found.damages, found.losses)
