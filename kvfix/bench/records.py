"""A benchmark's records: JSON lines that are only ever appended to, so that one that was broken off goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvfix.errors import UsageError

SCHEMA = "kvfix.item/1"
STALE = "stale"  # the selector of an item's own record
TRANSPLANT = "transplant:"  # before a selector's name: its rows are copied from the fresh cache
DIAGNOSTIC = ("causal", "carrier")  # selectors that are told the fresh cache and the answers; no other ever is

Record = dict[str, Any]


def key_of(record: Record) -> tuple:
    """What no two records share."""
    return (record["id"], record["selector"], record["k"], record["seed"], record["model"]["fingerprint"])


class Records:
    """What is known already; on disk where a file is given.

    `key_of` tells what no two records share: with `bench items` item, selector, k, seed and model. A last line
    that was not written to its end is left out, and overwritten by what is appended.
    """

    def __init__(
        self, path: Path | None = None, key_of: Callable[[Record], tuple] = key_of, command: str = "bench items"
    ) -> None:
        self.path, self._key_of, self._command = path, key_of, command
        self.all: list[Record] = []
        self._known: dict[tuple, Record] = {}
        self._torn_at: int | None = None  # bytes of whole lines, where more follows them
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path}: cannot read the records: {error.strerror}") from error
        whole = data[: data.rfind(b"\n") + 1]
        self._torn_at = len(whole) if len(whole) < len(data) else None
        for number, line in enumerate(whole.splitlines(), 1):
            self._note(self._parse(line, f"{path}:{number}"))

    def _note(self, record: Record) -> None:
        key = self._key_of(record)
        if key not in self._known:
            self._known[key] = record
            self.all.append(record)

    def _parse(self, line: bytes, where: str) -> Record:
        try:
            record = json.loads(line)
            self._key_of(record)
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(f"{where}: not a record of `kvfix {self._command}`") from error
        return record

    def find(self, *key: object) -> Record | None:
        """The record of one repair by one model, by all that its key is made of."""
        return self._known.get(key)

    def add(self, records: Iterable[Record]) -> None:
        """Take over records and have them on disk before returning."""
        records = list(records)
        for record in records:
            self._note(record)
        if self.path is None:
            return
        lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if self._torn_at is not None:
                    file.truncate(self._torn_at)
                    self._torn_at = None
                file.write(lines.encode())
        except OSError as error:
            raise UsageError(f"{self.path}: cannot write the records: {error.strerror}") from error
