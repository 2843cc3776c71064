"""Verify: every file of a store against its name, its record and the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from kvfix.errors import KVFixError
from kvfix.store import files, garbage, jsonfile, models, objects, records
from kvfix.store.damage import DamagedFileError
from kvfix.store.layout import Layout
from kvfix.store.manifest import Manifest
from kvfix.store.records import Detail, SegmentRef, VersionRecord
from kvfix.store.snapshot import open_snapshot

Found = TypeVar("Found")


@dataclass(frozen=True)
class Damage:
    """One damaged file, and one version that needs it; the version's fields are None where nothing does."""

    corpus: str | None
    doc: str | None
    version: int | None
    path: str  # below the store
    what: str


class Audit:
    """One pass over a store. Nothing found keeps it from looking further."""

    def __init__(self, layout: Layout, manifest: Manifest) -> None:
        self._layout = layout
        self._manifest = manifest
        self._found: list[Damage] = []
        self._seen: set[Path] = set()

    @property
    def found(self) -> list[Damage]:
        """What has been noted so far."""
        return list(self._found)

    def run(self, which: Sequence[VersionRecord] | None) -> list[Damage]:
        """Everything that is wrong; with `which`, only in what those versions need."""
        manifest = self._layout.manifest
        versions = (self.attempt(manifest, [], self._manifest.versions) or []) if which is None else list(which)
        self._models(versions)
        details = self._records(versions)
        broken = self._segments(details)
        self._snapshots(details, broken)
        if which is None:
            self._manifest_itself()
            self._sealed({record.model for record in versions})
            self._unused()
        return self._still_true()

    def whole(self, details: Sequence[Detail]) -> list[Detail]:
        """Those of the details whose segments are as they were written and compose; what others lack is noted."""
        broken = self._segments(details)
        failed = self._snapshots(details, broken)
        return [
            detail
            for detail in details
            if detail.record.record_id not in failed and broken.isdisjoint(segment.name for segment in detail.segments)
        ]

    def _note(self, path: Path, error: BaseException | str, affected: Iterable[VersionRecord] = ()) -> None:
        what = "it is missing" if isinstance(error, FileNotFoundError) else getattr(error, "reason", str(error))
        name = self._layout.relative(path)
        rows = [Damage(record.corpus, record.doc_id, record.version, name, what) for record in affected]
        self._found += rows or [Damage(None, None, None, name, what)]

    def attempt(
        self, path: Path, affected: Iterable[VersionRecord], look: Callable[..., Found], *arguments: object
    ) -> Found | None:
        """What `look` returns; if it raises, None, and the damage is noted."""
        self._seen.add(path)
        try:
            return look(*arguments)
        except (KVFixError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            self._note(path, error, affected)
            return None

    def _models(self, versions: Sequence[VersionRecord]) -> None:
        by_model: dict[str, list[VersionRecord]] = {}
        for record in versions:
            by_model.setdefault(record.model, []).append(record)
        for fingerprint, affected in by_model.items():
            path = self._layout.root / "models" / f"{fingerprint}.json"
            self.attempt(path, affected, present, models.load_model, self._layout, fingerprint)

    def _records(self, versions: Sequence[VersionRecord]) -> list[Detail]:
        """The record files that are sound, each compared with the manifest's row."""
        sound = []
        references = self.attempt(self._layout.manifest, [], self._manifest.references)
        for record in versions:
            path = self._layout.root / "records" / str(record.record_id)[:2] / f"{record.record_id}.json"
            detail = self.attempt(path, [record], self._record, record)
            if detail is None:
                continue
            sound.append(detail)
            differing = [f.name for f in fields(record) if getattr(record, f.name) != getattr(detail.record, f.name)]
            key = (record.corpus, record.doc_id, record.version)
            if references is not None and references.get(key, []) != [segment.name for segment in detail.segments]:
                differing.append("segments")
            if differing:
                self._note(
                    self._layout.manifest, f"its row differs from the record in {', '.join(differing)}", [record]
                )
        return sound

    def _record(self, record: VersionRecord) -> Detail:
        path = self._layout.record(record.record_id)
        return records.decode(files.read_bytes(self._layout, path), path)

    def _segments(self, details: Sequence[Detail]) -> set[str]:
        """Check each segment once; the names of those that are damaged."""
        users: dict[str, list[tuple[VersionRecord, SegmentRef]]] = {}
        for detail in details:
            for segment in detail.segments:
                users.setdefault(segment.name, []).append((detail.record, segment))
        broken = set()
        for name, uses in users.items():
            path = self._layout.object(name)
            affected = [record for record, _ in uses]
            if not self.attempt(path, affected, self._segment, path, uses):
                broken.add(name)
        return broken

    def _segment(self, path: Path, uses: list[tuple[VersionRecord, SegmentRef]]) -> bool:
        for segment in {use.size: use for _, use in uses}.values():
            objects.check_shape(self._layout, path, segment.size)
        if objects.hash_file(path) != path.stem:
            raise DamagedFileError(path, f"its checksum differs{self._where(path, uses[0][1])}")
        for segment in {str(use.checksums): use for _, use in uses}.values():
            objects.check_tensors(path, objects.open_segment(self._layout, segment), segment)
        return True

    def _where(self, path: Path, segment: SegmentRef) -> str:
        """The tensor that is damaged, as far as that can be told."""
        try:
            objects.check_tensors(path, objects.open_segment(self._layout, segment), segment)
        except DamagedFileError as error:
            return f": {error.reason}"
        except (ValueError, TypeError, RuntimeError, MemoryError):
            return ", and it cannot be opened"
        return ", outside its tensors"

    def _snapshots(self, details: Sequence[Detail], broken: set[str]) -> set[str]:
        """Compose every version whose files are sound; the record_ids of those that do not compose."""
        failed = set()
        for detail in details:
            record = detail.record
            if record.kind == "tombstone" or any(segment.name in broken for segment in detail.segments):
                continue
            path = self._layout.record(record.record_id)
            if self.attempt(path, [record], open_snapshot, self._layout, detail, False) is None:
                failed.add(record.record_id)
        return failed

    def _manifest_itself(self) -> None:
        path = self._layout.manifest
        for problem in self.attempt(path, [], self._manifest.problems) or []:
            self._note(path, problem)
        for corpus, doc_id, version in self.attempt(path, [], self._manifest.headless) or []:
            self._found.append(Damage(corpus, doc_id, version, path.name, f"its head, version {version}, is not there"))
        for corpus, doc_id, head, newest in self.attempt(path, [], self._manifest.mistaken) or []:
            shown = "none" if head is None else f"version {head}"
            self._found.append(
                Damage(corpus, doc_id, newest, path.name, f"its head is {shown}, its newest version {newest}")
            )

    def _sealed(self, seen: set[str]) -> None:
        """Models that no version names, and gate reports."""
        names = {path.stem for path in (self._layout.root / "models").glob("*")}
        names |= set(self.attempt(self._layout.manifest, [], self._manifest.fingerprints) or [])
        for fingerprint in sorted(names - seen):
            path = self._layout.root / "models" / f"{fingerprint}.json"
            self.attempt(path, [], present, models.load_model, self._layout, fingerprint)
        for fingerprint, backend in self.attempt(self._layout.manifest, [], self._manifest.gates) or []:
            path = self._layout.gate(fingerprint, backend)
            self.attempt(path, [], present, models.load_gate, self._layout, fingerprint, backend)
        for path in sorted(set((self._layout.root / "gates").glob("*")) - self._seen):
            self.attempt(path, [], jsonfile.load_sealed, self._layout, path)

    def _unused(self) -> None:
        """Segments and records that nothing sound refers to: garbage, or all that is left of an entry."""
        for path in self.attempt(self._layout.root / "objects", [], garbage.stored, self._layout) or []:
            if path not in self._seen and self.attempt(path, [], objects.hash_file, path) not in (None, path.stem):
                self._note(path, "its checksum differs")

    def _still_true(self) -> list[Damage]:
        """Without what concerns versions that were replaced while we looked."""
        now = self.attempt(self._layout.manifest, [], self._manifest.versions)
        if now is None:
            return self._found
        kept = {(record.corpus, record.doc_id, record.version) for record in now}
        manifest = self._layout.manifest.name
        return [
            item
            for item in self._found
            if item.doc is None or item.path == manifest or (item.corpus, item.doc, item.version) in kept
        ]


def present(load: Callable[..., Found | None], *arguments: object) -> Found:
    """What `load` finds; FileNotFoundError if that is nothing."""
    found = load(*arguments)
    if found is None:
        raise FileNotFoundError
    return found
