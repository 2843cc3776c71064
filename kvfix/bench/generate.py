"""Benchmark items: a synthetic record and its lookup rows among filler documents, before and after an edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvfix.bench.families import FAMILIES, IMPLICIT, Family, Implicit
from kvfix.bench.items import CONDITIONS, Item
from kvfix.diff import diff_tokens
from kvfix.errors import UsageError
from kvfix.selectors.blocks import blocks

if TYPE_CHECKING:
    from kvfix.engine.text import Text

VARIANTS = ("same", "length", "edits")  # same length; of changing length; several edits at once
SPLITS = ("development", "holdout")
EDIT_AT = (0.25, 0.40)  # place of the span, as a share of the context
MAX_SPAN = 6
GROUP = 5  # items that share the filler before their record
MAX_TRIES = 60
END = 60  # tokens; what is missing at the end of a stretch of filler counts as so many at least
SLACK = 1.5  # a paragraph may be so many times as long as what is missing


@dataclass(frozen=True)
class Wanted:
    """What to generate: `count` items of one condition, distance and variant."""

    condition: str
    count: int
    distance: int = 0  # tokens between the edit's record and the rows
    variant: str = "same"
    split: str = "holdout"
    context: int = 1200  # tokens
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("condition", self.condition, CONDITIONS),
            ("variant", self.variant, VARIANTS),
            ("split", self.split, SPLITS),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; there are: {', '.join(known)}")
        for name, number, least in (
            ("count", self.count, 1),
            ("distance", self.distance, 0),
            ("context", self.context, 1),
            ("seed", self.seed, 0),
        ):
            if number < least:
                raise UsageError(f"{name} must be at least {least}, not {number}")
        if (self.condition, self.variant) == ("implicit", "length"):
            raise UsageError("implicit items have no variant length: their rows describe single names")

    @property
    def is_holdout(self) -> bool:
        return self.split == "holdout"


@dataclass(frozen=True)
class _Draft:
    """One item's texts before they stand in a context."""

    family: str
    record: tuple[str, str]  # before and after the edit
    parts: tuple[str, ...]  # lookup documents, in order; the first stands at the distance
    question: str
    old: str
    new: str
    words: tuple[str, ...]  # that the filler must not hold


class Filler:
    """Paragraphs of real documents with their token counts, drawn document by document."""

    def __init__(self, texts: Sequence[str], text: Text) -> None:
        cut = [
            [t[b.start : b.end].rstrip("\r\n") + "\n\n" for b in blocks(t) if t[b.start : b.end].strip()] for t in texts
        ]
        self.documents = [[(piece, len(text.plain_ids(piece))) for piece in pieces] for pieces in cut if pieces]
        self.num_tokens = sum(count for pieces in self.documents for _, count in pieces)
        if not self.num_tokens:
            raise UsageError("the filler holds no text")
        # or a stretch of it would never end
        if min(count for pieces in self.documents for _, count in pieces) > END * SLACK:
            raise UsageError(f"the filler holds no paragraph of {END * SLACK:.0f} tokens or fewer")

    def draw(self, rng: np.random.Generator) -> Iterator[tuple[str, int]]:
        """Endless paragraphs: whole documents in random order."""
        while True:
            for index in rng.permutation(len(self.documents)):
                yield from self.documents[index]


def generate(text: Text, filler: Filler, wanted: Wanted) -> Iterator[Item]:
    """The items of one kind, the same for the same seed, filler and tokenizer.

    Each meets the filters: spans of at most 6 tokens, the first at 25-40% of the context, equal token counts unless the
    variant says otherwise, and no subject, alias or value in the filler. Source: arXiv 2609.17983; families, chains,
    implicit links and variants are ours. Raises `UsageError` where the filler makes them impossible.
    """
    for number in range(wanted.count):
        group = np.random.default_rng([wanted.seed, wanted.context, number // GROUP])
        shared = int(group.integers(1 << 30))
        for attempt in range(MAX_TRIES):
            rng = np.random.default_rng([wanted.seed, wanted.context, number, attempt])
            item = _item(text, filler, wanted, number, shared + attempt // 8, rng)
            if item is not None:
                yield item
                break
        else:
            raise UsageError(
                f"no item of {wanted.condition} {wanted.variant} fits {wanted.context} tokens of this filler"
            )


def _item(
    text: Text, filler: Filler, wanted: Wanted, number: int, shared: int, rng: np.random.Generator
) -> Item | None:
    draft = _draft(wanted, number, rng)
    lead = np.random.default_rng(shared)
    context = _context(text, filler, wanted, draft, lead, rng)
    if context is None:
        return None
    before, after = context
    if not _passes(text, wanted, before, after):
        return None
    where = f"-{wanted.distance}" if wanted.condition == "distance" or wanted.distance else ""
    kind = "" if wanted.variant == "same" else f"-{wanted.variant}"
    return Item(
        id=f"{wanted.condition}{where}{kind}-{wanted.context}-{wanted.seed}-{number:03}-{draft.family}",
        condition=wanted.condition,
        distance=wanted.distance,
        before=before,
        after=after,
        question=draft.question,
        old=draft.old,
        new=draft.new,
        family=draft.family,
        split=wanted.split,
    )


# ---- one record and its rows


def _draft(wanted: Wanted, number: int, rng: np.random.Generator) -> _Draft:
    if wanted.condition == "implicit":
        implicit = [family for family in IMPLICIT if family.holdout == wanted.is_holdout]
        return _implicit(implicit[number % len(implicit)], rng)
    families = [family for family in FAMILIES if family.holdout == wanted.is_holdout]
    return _explicit(families[number % len(families)], wanted, rng)


def _explicit(family: Family, wanted: Wanted, rng: np.random.Generator) -> _Draft:
    subject = str(rng.choice(family.subjects))
    old, new = map(str, rng.choice(family.aliases, 2, replace=False))
    names: tuple[str, ...] = (subject, old, new)
    if wanted.variant == "length":
        more = str(rng.choice([alias for alias in family.aliases if alias not in (old, new)]))
        names = (*names, more)
        new = f"{new} {rng.choice(['Upper', 'Lower', 'New', 'Old', 'Great', 'Little'])} {more}"
    values = list(map(str, rng.choice(family.values, 2, replace=False)))
    record = tuple(family.record.format(subject=subject, alias=alias) for alias in (old, new))
    order = rng.permutation(2)
    parts: tuple[str, ...]
    if wanted.condition == "chain":
        middles = list(map(str, rng.choice(family.middles, 2, replace=False)))
        first = [family.first_row.format(alias=a, middle=m) for a, m in zip((old, new), middles, strict=True)]
        second = [family.second_row.format(middle=m, value=v) for m, v in zip(middles, values, strict=True)]
        parts = (
            family.heading + "".join(first[n] for n in order) + "\n",
            family.second_heading + "".join(second[n] for n in rng.permutation(2)) + "\n",
        )
        words = (*names, *middles, *values)
    else:
        rows = [family.row.format(alias=a, value=v) for a, v in zip((old, new), values, strict=True)]
        parts = (family.heading + "".join(rows[n] for n in order) + "\n",)
        words = (*names, *values)
    is_direct = wanted.condition == "direct"
    answers = (old, new) if is_direct else values
    question = (family.direct if is_direct else family.question).format(subject=subject)
    return _Draft(family.name, (record[0], record[1]), parts, question, f" {answers[0]}", f" {answers[1]}", words)


def _implicit(family: Implicit, rng: np.random.Generator) -> _Draft:
    subject = str(rng.choice(family.subjects))
    old = family.pairs[int(rng.integers(len(family.pairs)))]
    others = [pair for pair in family.pairs if pair[1] != old[1]]
    new = others[int(rng.integers(len(others)))]
    values = list(map(str, rng.choice(family.values, 2, replace=False)))
    rows = [family.row.format(called=pair[1], value=v) for pair, v in zip((old, new), values, strict=True)]
    part = family.heading + "".join(rows[n] for n in rng.permutation(2)) + "\n"
    record = [family.record.format(subject=subject, alias=pair[0]) for pair in (old, new)]
    question = family.question.format(subject=subject)
    words = (subject, old[0], new[0], *values)
    return _Draft(family.name, (record[0], record[1]), (part,), question, f" {values[0]}", f" {values[1]}", words)


# ---- its place among filler


def _context(
    text: Text, filler: Filler, wanted: Wanted, draft: _Draft, lead: np.random.Generator, rng: np.random.Generator
) -> tuple[str, str] | None:
    """Both texts: filler, record, filler up to the distance, rows, filler; None where a word is elsewhere too."""
    paragraphs = filler.draw(lead)
    head = _take(paragraphs, round(0.31 * wanted.context))
    second = _second_edit(wanted, draft, rng)
    gaps = [_take(paragraphs, wanted.distance)]
    gaps += [_take(paragraphs, max(wanted.distance, 200)) for _ in draft.parts[1:]]
    used = sum(len(text.plain_ids(piece)) for piece in (head, draft.record[1], second[1], *gaps, *draft.parts))
    tail = _take(paragraphs, max(wanted.context - used, 0))
    loose = head + "".join(gaps) + "".join(second) + tail
    if any(word.lower() in loose.lower() for word in draft.words):
        return None
    middle = "".join(gap + part for gap, part in zip(gaps, draft.parts, strict=True))
    # rows at no distance belong to the record's own document
    if not wanted.distance:
        middle = middle.split("\n\n", 1)[1]
    before, after = (head + record + middle + more + tail for record, more in zip(draft.record, second, strict=True))
    return before.rstrip("\n") + "\n", after.rstrip("\n") + "\n"


def _second_edit(wanted: Wanted, draft: _Draft, rng: np.random.Generator) -> tuple[str, str]:
    """Another record with an edit of its own behind the rows, which the question does not need."""
    if wanted.variant != "edits":
        return "", ""
    others = [
        family for family in FAMILIES if family.name != draft.family and family.holdout == (wanted.split == "holdout")
    ]
    other = others[int(rng.integers(len(others)))]
    subject = str(rng.choice(other.subjects))
    old, new = map(str, rng.choice(other.aliases, 2, replace=False))
    return other.record.format(subject=subject, alias=old), other.record.format(subject=subject, alias=new)


def _take(paragraphs: Iterator[tuple[str, int]], num_tokens: int) -> str:
    """Paragraphs of about `num_tokens` tokens in all, at least that many where any are wanted."""
    taken, count = [], 0
    while count < num_tokens:
        piece, tokens = next(paragraphs)
        if tokens <= max(num_tokens - count, END) * SLACK:
            taken.append(piece)
            count += tokens
    return "".join(taken)


def _passes(text: Text, wanted: Wanted, before: str, after: str) -> bool:
    old, new = text.encode(before), text.encode(after)
    diff = diff_tokens(old.token_ids, new.token_ids)
    if len(diff.spans) != (2 if wanted.variant == "edits" else 1):
        return False
    if any(max(span.num_old, span.num_new) > MAX_SPAN for span in diff.spans):
        return False
    low, high = (share * diff.num_new for share in EDIT_AT)
    return diff.length_preserving == (wanted.variant != "length") and low <= diff.first <= high
