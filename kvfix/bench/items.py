"""Benchmark items: a text before and after an edit, and a question whose answer the edit changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvfix.errors import UsageError
from kvfix.jsonlines import Format, read_objects, text_fault

CONDITIONS = ("direct", "derived", "distance", "chain", "implicit")
FIELDS = ("id", "condition", "distance", "before", "after", "question", "old", "new")
REMARKS = ("family", "split")
FORMAT = Format("the items file", "an item", FIELDS, REMARKS)
MAY_BE_EMPTY = ("old", "new")


@dataclass(frozen=True)
class Item:
    """One line of an items file. Question and answers are used verbatim, each tokenised apart, behind the text."""

    id: str
    condition: str
    distance: int  # tokens from the edit to what the answer rests on
    before: str  # the whole text
    after: str
    question: str
    old: str
    new: str
    family: str | None = None
    split: str | None = None

    @property
    def digest(self) -> str:
        """12 hex digits of all that an answer depends on."""
        texts = [self.before, self.after, self.question, self.old, self.new]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


def load_items(path: str | Path) -> list[Item]:
    """Read an items file, one JSON object a line. Raises `UsageError`, which names file, line and field."""
    items: dict[str, Item] = {}
    for where, fields in read_objects(path, FORMAT):
        item = _item(fields, where)
        if item.id in items:
            raise UsageError(f"{where}: field 'id': {item.id!r} has come before")
        items[item.id] = item
    if not items:
        raise UsageError(f"{path}: holds no items")
    return list(items.values())


def dump_items(path: str | Path, items: Iterable[Item]) -> None:
    """Write an items file; remarks that are not set are left out."""
    lines = []
    for item in items:
        fields = {name: value for name, value in asdict(item).items() if value is not None}
        lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def _item(fields: dict, where: str) -> Item:
    for name in FIELDS + REMARKS:
        fault = _fault(fields, name)
        if fault:
            raise UsageError(f"{where}: field {name!r} {fault}")
    for one, other in (("before", "after"), ("old", "new")):
        if fields[one] == fields[other]:
            raise UsageError(f"{where}: fields {one!r} and {other!r} are the same")
    return Item(**fields)


def _fault(fields: dict, name: str) -> str | None:
    value = fields.get(name)
    if name in REMARKS and value is None:
        return None
    if name not in fields:
        return "is missing"
    if name == "distance":
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return None if whole else f"must be a whole number of tokens, not {json.dumps(value)}"
    fault = text_fault(value, name in MAY_BE_EMPTY)
    if fault:
        return fault
    if name == "condition" and value not in CONDITIONS:
        return f"must be one of {', '.join(CONDITIONS)}, not {value!r}"
    return None
