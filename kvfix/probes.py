"""Questions whose answers an edit changed: made from a diff, or given in a probes file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvfix.errors import UsageError
from kvfix.jsonlines import Format, read_objects, text_fault

if TYPE_CHECKING:
    import numpy as np

    from kvfix.core import EditSpan, TokenDiff

LEAD_IN = "\n\nAs stated above: "
MAX_LEAD = 64
MAX_ANSWER = 24
PROBES_FILE = "probes.jsonl"
FIELDS = ("question", "old", "new", "doc")
FORMAT = Format("the probes file", "a probe", FIELDS, ("distance", "edit", "id", "kind", "note"))

# each match ends where a sentence, list item, row or block may begin; a run of dots is tried once, at its first
_BOUNDARY = re.compile(
    r"""
      ^[ \t]*(?:\||\#{1,6}[ ]).*(?:\n(?:[ \t\r]*\n)*|\Z)                      # after a table row or a heading
    | \n(?:[ \t\r]*\n)+                                                      # after blank lines
    | \n(?=[ \t]*(?:[-*+•]|\d{1,9}[.)]|\#{1,6}|>)[ \t])                      # before an item, heading or quotation
    | \n(?=[ \t]*\|)                                                         # before a table row
    | (?<![.!?…])[.!?…]+["')\]*_`”’»]*(?=\s+(?![a-z\s]))(?:\s*\n)?           # after a sentence; not before "e.g. the"
    | [。！？]+[」』”]*
    """,
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True)
class Probe:
    """A query placed after the document, and the answers before and after the edit, all as token ids."""

    kind: str  # "auto" or "given"
    question: str
    query_ids: tuple[int, ...]
    old: str
    new: str
    old_ids: tuple[int, ...]  # empty for an insertion
    new_ids: tuple[int, ...]  # empty for a deletion


@dataclass(frozen=True)
class GivenProbe:
    """One line of a probes file; without `doc` it is asked of every document."""

    question: str
    old: str
    new: str
    doc: str | None = None


def auto_probes(
    diff: TokenDiff,
    new_ids: np.ndarray,
    old_ids: np.ndarray,
    new_text: str,
    new_offsets: np.ndarray,
    old_text: str,
    old_offsets: np.ndarray,
    encode: Callable[[str], list[int]],
    num_prefix: int,
    max_probes: int = 8,
) -> list[Probe]:
    """One probe a span: "As stated above: " and the text that leads to it, answered by its old and its new tokens.

    The lead is made of the new document's own ids, from the start of the sentence, table row or list item, 64 at
    most; where it is empty there is no probe. `ids` include the context prefix of `num_prefix` tokens, `offsets`
    `[N, 2]` do not. Above `max_probes`, evenly spread spans are asked: the caller sees it by the count. Their form
    is this project's definition.
    """
    from kvfix.diff import slice_text

    frame = tuple(encode(LEAD_IN))
    starts = _lead_starts(diff.spans, new_text, new_offsets, num_prefix)
    leads = [
        slice_text(new_text, new_offsets, start - num_prefix, span.new_start - num_prefix).strip()
        for span, start in zip(diff.spans, starts, strict=True)
    ]
    asked = [asked for asked in zip(diff.spans, starts, leads, strict=True) if asked[-1]]
    probes = []
    for span, start, lead in _spread(asked, max_probes):
        old_end, new_end = (
            min(span.old_end, span.old_start + MAX_ANSWER),
            min(span.new_end, span.new_start + MAX_ANSWER),
        )
        probes.append(
            Probe(
                kind="auto",
                question=lead,
                query_ids=frame + _tuple(new_ids[start : span.new_start]),
                old=slice_text(old_text, old_offsets, span.old_start - num_prefix, old_end - num_prefix),
                new=slice_text(new_text, new_offsets, span.new_start - num_prefix, new_end - num_prefix),
                old_ids=_tuple(old_ids[span.old_start : old_end]),
                new_ids=_tuple(new_ids[span.new_start : new_end]),
            )
        )
    return probes


def given_probes(
    items: Iterable[GivenProbe],
    doc_id: str,
    frame: Callable[[str], list[int]],
    encode: Callable[[str], list[int]],
) -> list[Probe]:
    """The probes meant for one document, encoded.

    `frame` turns a question into a query in the model's form; a question that begins with whitespace is placed
    verbatim. Answers get a leading space unless they begin with whitespace.
    """
    probes = []
    for item in items:
        if item.doc not in (None, doc_id):
            continue
        query = encode(item.question) if item.question[0].isspace() else frame(item.question)
        old, new = _answer(item.old), _answer(item.new)
        old_ids, new_ids = (tuple(encode(text)) if text else () for text in (old, new))
        probes.append(Probe("given", item.question, tuple(query), old, new, old_ids, new_ids))
    return probes


def default_probes(corpus: str) -> list[GivenProbe]:
    """The probes that lie beside a corpus's documents, in `probes.jsonl`; none where there is no such file."""
    path = Path(corpus, PROBES_FILE)
    return load_probes(path) if path.is_file() else []


def load_probes(path: str | Path) -> list[GivenProbe]:
    """Read a probes file: one JSON object a line with `question`, `old`, `new` and, where it is about one, `doc`.

    The format's remarks are allowed and passed over.

    Raises UsageError, which names file, line and field.
    """
    return [_given(fields, where) for where, fields in read_objects(path, FORMAT)]


def _given(fields: dict, where: str) -> GivenProbe:
    for name in FIELDS:
        fault = _fault(fields, name)
        if fault:
            raise UsageError(f"{where}: field {name!r} {fault}")
    if fields["old"] == fields["new"]:
        raise UsageError(f"{where}: fields 'old' and 'new' are the same")
    return GivenProbe(**{name: fields[name] for name in FIELDS if name in fields})


def _fault(fields: dict, name: str) -> str | None:
    if name == "doc" and fields.get(name) is None:
        return None
    return text_fault(fields[name], name in ("old", "new")) if name in fields else "is missing"


def _answer(text: str) -> str:
    return text if not text or text[0].isspace() else f" {text}"


def _tuple(ids: np.ndarray) -> tuple[int, ...]:
    return tuple(ids.tolist())


def _spread(items: list, most: int) -> list:
    """At most `most` of `items`, evenly spread, first and last among them."""
    import numpy as np

    if len(items) <= most:
        return items
    return [items[index] for index in np.linspace(0, len(items) - 1, most).round().astype(int)]


def part_starts(text: str) -> list[int]:
    """Characters at which a sentence, list item, table row or block may begin, ascending, 0 among them."""
    return [0, *(match.end() for match in _BOUNDARY.finditer(text))]


def _lead_starts(spans: Iterable[EditSpan], text: str, offsets: np.ndarray, num_prefix: int) -> list[int]:
    """For each span the new position at which its sentence, row or item begins; `new_start` itself for no lead."""
    import numpy as np

    boundaries = np.array(part_starts(text))
    starts = []
    for span in spans:
        at = span.new_start - num_prefix
        # where the token before the span ends, so that spaces in no token belong to the span
        char = int(offsets[at - 1][1]) if at > 0 else 0
        boundary = boundaries[np.searchsorted(boundaries, char, side="right") - 1]
        first = int(np.searchsorted(offsets[:at, 0], boundary, side="left")) if at > 0 else 0
        starts.append(num_prefix + max(first, at - MAX_LEAD, 0) if at > 0 else span.new_start)
    return starts
