"""The index over the version records, and the place where a commit becomes true."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
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

    def __init__(self, path: Path, *, read_only: bool, busy_s: float) -> None:
        self.path = path
        self.database = Database(path, read_only=read_only, busy_s=busy_s)
        self.keep = DEFAULT_KEEP

    def create(self) -> None:
        """Make the tables where there are none."""
        with self.database.writing() as connection:
            schema.metadata.create_all(connection)
            if connection.scalar(select(func.count()).select_from(meta)) == 0:
                facts = {"format": str(schema.FORMAT_VERSION), "keep": str(DEFAULT_KEEP)}
                connection.execute(insert(meta), [{"key": key, "value": value} for key, value in facts.items()])

    def check_format(self) -> None:
        """Read the settings; UsageError if a newer kvfix wrote them, StoreDamagedError if they make no sense."""
        with self.database.reading() as connection:
            told = select(meta).where(meta.c.key.in_(("format", "keep")))
            facts = {row.key: row.value for row in connection.execute(told)}
        try:
            number, self.keep = int(facts["format"]), int(facts["keep"])
        except (KeyError, ValueError) as error:
            raise StoreDamagedError(f"{self.path} is damaged. Run: kvfix fsck --rebuild") from error
        if number > schema.FORMAT_VERSION:
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
        return [] if found == ["ok"] else found

    def _records(self, query: Select) -> list[VersionRecord]:
        with self.database.reading() as connection:
            return [VersionRecord(*row) for row in connection.execute(query)]


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

    records = connection.scalars(select(versions.c.record_id).where(goes(versions))).all()
    names = connection.scalars(select(segments.c.name).where(goes(segments))).all()
    for table in (segments, versions):
        connection.execute(delete(table).where(goes(table)))
    return Garbage(tuple(records), tuple(names))


def _referenced(connection: Connection, names: Iterable[str]) -> set[str]:
    """Those of the names that a version still needs."""
    return set(connection.scalars(select(segments.c.name).where(segments.c.name.in_(list(names)))))
