"""The SQLite file behind the manifest: how it is opened, and what its errors mean."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from kvfix.errors import DocumentError, KVFixError, StoreBusyError, StoreDamagedError, StoreNotWritableError


class Database:
    """Short transactions on one SQLite file; no connection is held between them."""

    def __init__(self, path: Path, *, read_only: bool, busy_s: float) -> None:
        self.path = path
        self.read_only = read_only
        self._busy_s = busy_s
        self._engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        event.listen(self._engine, "begin", self._begin)

    def _roll_back(self) -> None:
        """Undo what a killed writer left half done, as far as this user may: a read-only connection cannot."""
        if self.path.with_name(f"{self.path.name}-journal").exists():
            with contextlib.suppress(sqlite3.Error), contextlib.closing(self._open("rw")) as connection:
                connection.execute("SELECT count(*) FROM sqlite_master")

    def _open(self, mode: str) -> sqlite3.Connection:
        uri = f"file:{quote(str(self.path))}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=self._busy_s, isolation_level=None, check_same_thread=False)

    def _connect(self) -> sqlite3.Connection:
        if self.read_only:
            # before each look: a writer may have been killed since the last one
            self._roll_back()
        connection = self._open("ro" if self.read_only else "rw")
        if not self.read_only:
            # the default journal, spelt out: a WAL would lock out read-only users and network disks
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("PRAGMA synchronous=EXTRA")
        return connection

    @staticmethod
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("kvfix_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction that sees one state."""
        with self._meaning(writes=False), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction that is durable when this returns, or never was."""
        if self.read_only:
            raise StoreNotWritableError(f"The store {self.path.parent} is open for reading only.")
        with self._meaning(writes=True), self._engine.connect() as connection:
            writer = connection.execution_options(kvfix_write=True)
            with writer.begin():
                yield writer

    @contextmanager
    def _meaning(self, *, writes: bool) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._error(str(error.orig), writes) from error
        except sqlite3.Error as error:
            raise self._error(str(error), writes) from error
        except UnicodeDecodeError as error:
            # sqlite3 passes on what a flipped bit made of a text, and of its own messages
            raise self._error("it holds a text that is not UTF-8", writes) from error
        except UnicodeEncodeError as error:
            raise DocumentError(f"The name {error.object!r} is not valid UTF-8 and cannot be stored.") from error

    def _error(self, reason: str, writes: bool) -> KVFixError:
        text = reason.lower()
        if "locked" in text:
            return StoreBusyError(f"{self.path} is locked by another process; waited {self._busy_s:g} s.")
        if "readonly" in text and not writes:
            return StoreDamagedError(
                f"{self.path} was left in mid-write and must be opened once by a user who may write it: run kvfix gc."
            )
        if "readonly" in text or "full" in text or (writes and ("unable to open" in text or "i/o" in text)):
            return StoreNotWritableError(f"Cannot write {self.path}: {reason}. The old entry is kept.")
        return StoreDamagedError(
            f"{self.path} is damaged ({reason}). Its entries can be read back from the records: kvfix fsck --rebuild"
        )

    def close(self) -> None:
        self._engine.dispose()
