"""Places tied to an edit by their words: sentences, list items and table rows behind it, the most telling first.

A place is tied to the edit by a word that the edit put in or took out, by a word of the edited sentence, or by a word
of a place that is tied to it itself. A word tells the more the fewer places hold it. Ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

import numpy as np

from kvfix.probes import part_starts
from kvfix.selectors.base import SelectionContext

IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
WORD = re.compile(rf"(?=([{IDEOGRAPH}]{{2}}))|((?:(?![{IDEOGRAPH}])\w)+)")  # pairs where words are not parted by spaces
IN_WORD = re.compile(r"\w")

EDITED, PASSED_ON, BESIDE = 1.0, 0.5, 0.3  # what a shared word counts, by where it comes from
LEAST = 1.0  # nats; what ties a place to the edit, at least
COMMON = 0.2  # words that more than this share of the places hold tie nothing, unless they were edited
HUBS = 4  # places whose words are passed on


@dataclass(frozen=True)
class Place:
    """The rows `[start, end)` of one sentence, list item or table row."""

    start: int
    end: int
    words: tuple[tuple[int, str], ...]  # character and word, in order


def linked_places(context: SelectionContext) -> Iterator[tuple[Place, int]]:
    """Places behind the edit that are tied to it, best first, each with the row of its first telling word."""
    places = places_of(context)
    held = Counter(word for place in places for word in {word for _, word in place.words})
    weight = {word: np.log((len(places) + 1) / (count + 0.5)) for word, count in held.items()}
    edited = edited_words(context)
    later = [place for place in places if place.end > context.diff.spans[0].new_end]
    telling = {word for word, count in held.items() if count <= max(1, COMMON * len(places))}

    value = dict.fromkeys(_sentence_words(context, places) & telling, BESIDE) | dict.fromkeys(edited, EDITED)
    hubs = _ranked(later, value, weight)[:HUBS]
    for place in hubs:
        yield place, _first_row(context, place, value)
    passed_on = {word for place in hubs for _, word in place.words} & telling
    value = dict.fromkeys(passed_on, PASSED_ON) | value
    for place in _ranked(later, value, weight):
        if place not in hubs:
            yield place, _first_row(context, place, value)


def _ranked(places: Iterable[Place], value: dict[str, float], weight: dict[str, float]) -> list[Place]:
    """The places that are tied by words of these values, best first."""
    shared = [(place, {word for _, word in place.words if word in value}) for place in places]
    # an exact sum does not depend on the order in which a set gives its words
    scored = [(place, fsum(value[word] * weight[word] for word in words)) for place, words in shared]
    tied = [entry for entry in scored if entry[1] >= LEAST]
    return [place for place, _ in sorted(tied, key=lambda entry: -entry[1])]


def _first_row(context: SelectionContext, place: Place, value: dict[str, float]) -> int:
    """The row of the place's first word that has a value."""
    character = next(at for at, word in place.words if word in value)
    return context.first_token(character + 1) - 1


def places_of(context: SelectionContext) -> list[Place]:
    """All sentences, items and rows of the text that hold a word, in order."""
    edges = [*part_starts(context.text), len(context.text)]
    found = [(low, words_of(context.text, low, high), high) for low, high in pairwise(sorted(set(edges)))]
    return [Place(context.first_token(low), context.first_token(high), words) for low, words, high in found if words]


def words_of(text: str, start: int, end: int) -> tuple[tuple[int, str], ...]:
    """Characters and case-folded words of `text[start:end]`."""
    found = ((match.start(), match[1] or match[2]) for match in WORD.finditer(text, start, end) if match[1] or match[2])
    return tuple((at, word.casefold()) for at, word in found)


def edited_words(context: SelectionContext) -> set[str]:
    """Words that the edit put in or took out: those of one side of a span and not of the other."""
    words: set[str] = set()
    prefix = context.num_prefix
    for span in context.diff.spans:
        new = _touched(context.text, context.offsets, span.new_start - prefix, span.new_end - prefix)
        old = _touched(context.old_text, context.old_offsets, span.old_start - prefix, span.old_end - prefix)
        words |= new ^ old
    return words


def _touched(text: str, offsets: np.ndarray, start: int, end: int) -> set[str]:
    """The words that document tokens `[start, end)` have a part in, and those that end or begin right there.

    The latter stand on both sides of a span unless it joins, parts, lengthens or shortens them.
    """
    if not len(offsets):
        return set()
    low = int(offsets[start - 1][1]) if start > 0 else 0
    high = int(offsets[end - 1][1]) if end > start else low
    while low > 0 and IN_WORD.match(text, low - 1):
        low -= 1
    while high < len(text) and IN_WORD.match(text, high):
        high += 1
    return {word for _, word in words_of(text, low, high)}


def _sentence_words(context: SelectionContext, places: Iterable[Place]) -> set[str]:
    """The words of the places that hold a span."""
    rows = np.array([max(span.new_end - 1, span.new_start) for span in context.diff.spans])
    around = [p for p in places if np.searchsorted(rows, p.start) < np.searchsorted(rows, p.end)]
    return {word for place in around for _, word in place.words}
