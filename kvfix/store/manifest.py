"""The index over the version records, and the place where a commit becomes true."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, delete, func, insert, literal, or_, select

from kvfix.errors import StoreBusyError, StoreDamagedError, UsageError
from kvfix.store import schema
from kvfix.store.database import Database
from kvfix.store.records import VersionRecord
from kvfix.store.schema import documents, gates, meta, models, segments, versions

COLUMNS = [versions.c[field.name] for field in fields(VersionRecord)]
DEFAULT_KEEP = 1
NOTE = "note:"  # what a name in `meta` begins with that is no fact about the store


@dataclass(frozen=True)
class Change:
    """One transaction: `record` becomes the head of its document where the head is still `expect`."""

    record: VersionRecord
    segments: tuple[str, ...]
    expect: VersionRecord | None
    replaces: bool = False  # the record takes the place of `expect`, under the same version number


@dataclass(frozen=True)
class Garbage:
    """Files that a transaction left without any reference."""

    records: tuple[str, ...]
    segments: tuple[str, ...]

    def joined(self, other: Garbage) -> Garbage:
        return Garbage(self.records + other.records, self.segments + other.segments)

    def without(self, names: set[str]) -> Garbage:
        return Garbage(self.records, tuple(sorted(set(self.segments) - names)))


class Manifest:
    """Documents, versions and what they refer to."""

    def __init__(self, path: Path, *, read_only: bool, busy_s: float, keep: int | None = None) -> None:
        self.path = path
        self.database = Database(path, read_only=read_only, busy_s=busy_s)
        self.given_keep = keep
        self.kept = DEFAULT_KEEP  # as the store itself says

    @property
    def keep(self) -> int:
        """How many versions a commit leaves behind the new one."""
        return self.kept if self.given_keep is None else self.given_keep

    def create(self) -> None:
        """Make the tables where there are none."""
        with self.database.writing() as connection:
            schema.metadata.create_all(connection)
            if connection.scalar(select(func.count()).select_from(meta)) == 0:
                facts = {"format": str(schema.FORMAT_VERSION), "keep": str(self.kept)}
                facts["seal"] = _seal(facts)
                connection.execute(insert(meta), [{"key": key, "value": value} for key, value in facts.items()])

    def check_format(self) -> None:
        """Read the settings; UsageError if a newer kvfix wrote them, StoreDamagedError if they make no sense."""
        facts = self._facts()
        try:
            number, self.kept = int(facts["format"]), int(facts["keep"])
        except (KeyError, ValueError, TypeError) as error:
            raise self._damaged() from error
        if number < 1 or self.kept < 0:
            raise self._damaged()
        if number > schema.FORMAT_VERSION:
            # a newer kvfix seals what it writes: a seal that does not fit means a flipped bit
            if not _is_sealed(facts):
                raise self._damaged()
            raise UsageError(
                f"The store {self.path.parent} has format {number}, written by a newer kvfix; this one knows "
                f"{schema.FORMAT_VERSION}. Upgrade kvfix, or build a new store."
            )

    def note(self, key: str) -> str | None:
        """What was noted under a name last; a rebuilt manifest has no notes."""
        with self.database.reading() as connection:
            return connection.scalar(select(meta.c.value).where(meta.c.key == f"{NOTE}{key}"))

    def set_note(self, key: str, value: str | None) -> None:
        """Note a text under a name, or forget it."""
        with self.database.writing() as connection:
            connection.execute(delete(meta).where(meta.c.key == f"{NOTE}{key}"))
            if value is not None:
                connection.execute(insert(meta).values(key=f"{NOTE}{key}", value=value))

    def head(self, corpus: str, doc_id: str) -> VersionRecord | None:
        with self.database.reading() as connection:
            return _head(connection, corpus, doc_id)

    def heads(self, corpus: str | None) -> list[VersionRecord]:
        """The heads of all documents, or of one corpus's, sorted: one query."""
        query = _heads().order_by(versions.c.corpus, versions.c.doc_id)
        if corpus is not None:
            query = query.where(documents.c.corpus == corpus)
        return self._records(query)

    def corpora(self) -> list[str]:
        with self.database.reading() as connection:
            return list(connection.scalars(select(documents.c.corpus).distinct().order_by(documents.c.corpus)))

    def version(self, corpus: str, doc_id: str, number: int) -> VersionRecord | None:
        mine = and_(versions.c.corpus == corpus, versions.c.doc_id == doc_id, versions.c.version == number)
        return next(iter(self._records(select(*COLUMNS).where(mine))), None)

    def versions(self) -> list[VersionRecord]:
        """Every version that is kept, tombstones included."""
        return self._records(select(*COLUMNS).order_by(versions.c.corpus, versions.c.doc_id, versions.c.version))

    def references(self) -> dict[tuple[str, str, int], list[str]]:
        """The segment names of each version, in order."""
        found: dict[tuple[str, str, int], list[str]] = {}
        with self.database.reading() as connection:
            for row in connection.execute(select(segments).order_by(segments.c.ordinal)):
                found.setdefault((row.corpus, row.doc_id, row.version), []).append(row.name)
        return found

    def headless(self) -> list[tuple[str, str, int]]:
        """Documents whose head is a version that the manifest does not hold."""
        query = select(documents).outerjoin(versions, _same(documents, versions)).where(versions.c.version.is_(None))
        with self.database.reading() as connection:
            return [(row.corpus, row.doc_id, row.version) for row in connection.execute(query)]

    def mistaken(self) -> list[tuple[str, str, int | None, int]]:
        """Documents whose head, which is there, is not their newest version: it, None for none, and the newest."""
        newest = {(record.corpus, record.doc_id): record for record in self.versions()}
        heads = {(record.corpus, record.doc_id): record.version for record in self.heads(None)}
        with self.database.reading() as connection:
            named = {(row.corpus, row.doc_id) for row in connection.execute(select(documents))}
        wrong = []
        for key, record in newest.items():
            expected = None if record.kind == "tombstone" else record.version
            if heads.get(key) != expected and (key in heads or key not in named):
                wrong.append((*key, heads.get(key), record.version))
        return wrong

    def next_version(self, corpus: str, doc_id: str) -> int:
        """The number after the largest that the document has had; a removed one counts on."""
        mine = and_(versions.c.corpus == corpus, versions.c.doc_id == doc_id)
        with self.database.reading() as connection:
            return (connection.scalar(select(func.max(versions.c.version)).where(mine)) or 0) + 1

    def commit(self, changes: Iterable[Change], fingerprint: str) -> Garbage:
        """Make all changes true at once; StoreBusyError, and none is made, if a head is not the one expected."""
        with self.database.writing() as connection:
            dropped = Garbage((), ())
            for change in changes:
                check_expected(_head(connection, change.record.corpus, change.record.doc_id), change)
                dropped = dropped.joined(_make_room(connection, change, self.keep))
                _insert(connection, change)
            _remember(connection, models, fingerprint=fingerprint)
            return dropped.without(_referenced(connection, dropped.segments))

    def fill(self, changes: Iterable[Change], fingerprints: Iterable[str], backends: Iterable[tuple[str, str]]) -> None:
        """Enter versions, in ascending order, models and gates into a new manifest, all at once."""
        with self.database.writing() as connection:
            for change in changes:
                _insert(connection, change)
            for fingerprint in fingerprints:
                _remember(connection, models, fingerprint=fingerprint)
            for fingerprint, backend in backends:
                _remember(connection, gates, fingerprint=fingerprint, backend=backend)

    def drop(self, unwanted: Iterable[VersionRecord]) -> Garbage:
        """Forget versions that are no heads; those that have become one, or have gone, are passed over."""
        with self.database.writing() as connection:
            dropped = Garbage((), ())
            for record in unwanted:
                head = _head(connection, record.corpus, record.doc_id)
                if head is not None and head.version > record.version:
                    dropped = dropped.joined(_drop(connection, partial(_is, record)))
            return dropped.without(_referenced(connection, dropped.segments))

    def forget_tombstones(self, before: str) -> None:
        """Drop the tombstones made before a time."""
        with self.database.writing() as connection:
            old = and_(versions.c.kind == "tombstone", versions.c.created_at < before)
            connection.execute(delete(versions).where(old))

    def remember(self, table: Table, **values: str) -> None:
        """Enter a row of `models` or `gates`."""
        with self.database.writing() as connection:
            _remember(connection, table, **values)

    def fingerprints(self) -> list[str]:
        with self.database.reading() as connection:
            return list(connection.scalars(select(models.c.fingerprint).order_by(models.c.fingerprint)))

    def gates(self) -> list[tuple[str, str]]:
        """The fingerprint and backend of every gate report."""
        with self.database.reading() as connection:
            return [(row.fingerprint, row.backend) for row in connection.execute(select(gates).order_by(*gates.c))]

    def problems(self) -> list[str]:
        """What SQLite's own check finds wrong."""
        with self.database.reading() as connection:
            found = list(connection.exec_driver_sql("PRAGMA integrity_check").scalars())
        facts = self._facts()
        if "seal" in facts and not _is_sealed(facts):
            found.append("its settings are not those that were written")
        return [problem for problem in found if problem != "ok"]

    def _facts(self) -> dict[str, str]:
        """The settings and their seal; whatever else is in the table is none of them."""
        told = select(meta).where(meta.c.key.in_((*schema.SETTINGS, "seal")))
        with self.database.reading() as connection:
            return {row.key: row.value for row in connection.execute(told)}

    def _damaged(self) -> StoreDamagedError:
        return StoreDamagedError(
            f"{self.path} is damaged: its settings make no sense. Its entries can be read back from the records: "
            "kvfix fsck --rebuild"
        )

    def _records(self, query: Select) -> list[VersionRecord]:
        with self.database.reading() as connection:
            return [VersionRecord(*row) for row in connection.execute(query)]


def _seal(facts: dict[str, str]) -> str:
    """A checksum of the settings, which no record repeats."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def _is_sealed(facts: dict[str, str]) -> bool:
    """Whether the settings are as they were written, as far as they carry a seal."""
    return facts.get("seal", "") in ("", _seal({key: value for key, value in facts.items() if key != "seal"}))


def check_expected(head: VersionRecord | None, change: Change) -> None:
    """Raise StoreBusyError unless the head is the version that the change was made from."""
    found = head.record_id if head else None
    wanted = change.expect.record_id if change.expect else None
    if found != wanted:
        raise StoreBusyError(
            f"{change.record.doc_id} was changed by another process in the meantime: version "
            f"{head.version if head else 'none'} now stands where {change.expect.version if change.expect else 'none'} "
            "was read. Nothing was stored; run the command again."
        )


def _same(left: Table, right: Table) -> ColumnElement[bool]:
    return and_(*(left.c[name] == right.c[name] for name in schema.KEY))


def _heads() -> Select:
    return select(*COLUMNS).join(documents, _same(documents, versions))


def _head(connection: Connection, corpus: str, doc_id: str) -> VersionRecord | None:
    mine = _heads().where(documents.c.corpus == corpus, documents.c.doc_id == doc_id)
    row: Row | None = connection.execute(mine).first()
    return VersionRecord(*row) if row else None


def _remember(connection: Connection, table: Table, **values: str) -> None:
    same = and_(*(table.c[name] == value for name, value in values.items()))
    if connection.execute(select(table).where(same)).first() is None:
        connection.execute(insert(table).values(**values))


def _insert(connection: Connection, change: Change) -> None:
    record = change.record
    key = {name: getattr(record, name) for name in schema.KEY}
    connection.execute(insert(versions).values(**asdict(record)))
    rows = [{**key, "ordinal": ordinal, "name": name} for ordinal, name in enumerate(change.segments)]
    if rows:
        connection.execute(insert(segments), rows)
    mine = and_(documents.c.corpus == record.corpus, documents.c.doc_id == record.doc_id)
    connection.execute(delete(documents).where(mine))
    if record.kind != "tombstone":
        connection.execute(insert(documents).values(**key))


def _make_room(connection: Connection, change: Change, keep: int) -> Garbage:
    """Drop the versions behind the new one and the `keep` before it: all behind a tombstone, and one it replaces."""
    record = change.record
    oldest = record.version if record.kind == "tombstone" else record.version - keep

    def goes(table: Table) -> ColumnElement[bool]:
        old = table.c.version < oldest
        replaced = and_(table.c.version == record.version, literal(change.replaces))
        return and_(table.c.corpus == record.corpus, table.c.doc_id == record.doc_id, or_(old, replaced))

    return _drop(connection, goes)


def _is(record: VersionRecord, table: Table) -> ColumnElement[bool]:
    return and_(*(table.c[name] == getattr(record, name) for name in schema.KEY))


def _drop(connection: Connection, goes: Callable[[Table], ColumnElement[bool]]) -> Garbage:
    """Forget the versions that `goes` picks, and what they needed."""
    records = connection.scalars(select(versions.c.record_id).where(goes(versions))).all()
    names = connection.scalars(select(segments.c.name).where(goes(segments))).all()
    for table in (segments, versions):
        connection.execute(delete(table).where(goes(table)))
    return Garbage(tuple(records), tuple(names))


def _referenced(connection: Connection, names: Iterable[str]) -> set[str]:
    """Those of the names that a version still needs."""
    return set(connection.scalars(select(segments.c.name).where(segments.c.name.in_(list(names)))))
