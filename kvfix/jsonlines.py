"""Files of one JSON object a line that people write: an error names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvfix.errors import UsageError


class Format(NamedTuple):
    """What the lines of a kind of file hold."""

    of: str  # "the probes file"
    one: str  # "a probe"
    fields: tuple[str, ...]
    remarks: tuple[str, ...] = ()  # fields for the file's readers


def read_objects(path: str | Path, form: Format) -> Iterator[tuple[str, dict]]:
    """Where each line stands (`FILE:LINE`) and its fields, blank lines passed over.

    Raises `UsageError` for a file that cannot be read, a line that is no JSON object, and a field of unknown name.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot read {form.of}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _parse(line, where, form)


def _parse(line: str, where: str, form: Format) -> dict:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: expected a JSON object with the fields {', '.join(form.fields)}")
    for name in fields:
        if name not in form.fields + form.remarks:
            remarks = f" (and, for its readers, {', '.join(form.remarks)})" if form.remarks else ""
            known = f"{form.one} has {', '.join(form.fields)}{remarks}"
            raise UsageError(f"{where}: unknown field {name!r}; {known}")
    return fields


def text_fault(value: object, may_be_empty: bool = True) -> str | None:
    """Why a field's value is not the text that it should be, to stand behind the field's name; None where it is."""
    if not isinstance(value, str):
        return f"must be a string, not {json.dumps(value)}"
    if any("\ud800" <= char <= "\udfff" for char in value):
        return "holds half a surrogate pair"
    return None if value or may_be_empty else "is empty"
