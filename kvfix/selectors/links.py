"""Places tied to an edit by their words: sentences, list items and table rows behind it, the most telling first.

A place is tied to the edit by a word that the edit put in or took out, by a word of the edited sentence, or by a word
of a place that is tied to it itself. A word tells the more the fewer places hold it. Ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from math import fsum

import numpy as np

from kvfix.probes import part_starts
from kvfix.selectors.base import SelectionContext

IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
WORD = re.compile(rf"(?=([{IDEOGRAPH}]{{2}}))|((?:(?![{IDEOGRAPH}])\w)+)")  # pairs where words are not parted by spaces
IN_WORD = re.compile(r"\w")

# what a shared word counts, by where it comes from: put in, taken out, of a linked place, of the edited sentence
PUT_IN, TAKEN_OUT, PASSED_ON, BESIDE = 1.0, 0.99, 0.5, 0.3
LEAST = 1.0  # nats; what ties a place to the edit, at least
COMMON = 0.2  # words that more than this share of the places hold tie nothing, unless no other was edited
STRONGEST = 2  # words of a place that count: a first and a last name
HUBS = 4  # places whose words are passed on


@dataclass(frozen=True)
class Place:
    """The rows `[start, end)` of one sentence, list item or table row."""

    start: int
    end: int
    words: tuple[tuple[int, str], ...]  # character and word, in order


def linked_places(context: SelectionContext) -> Iterator[tuple[Place, int]]:
    """Places behind the edit that are tied to it, best first, each with the row of its first telling word."""
    around, others = _parted(context)
    # the edited sentence itself says nothing of how rare its words are
    held = Counter(word for place in others for word in {word for _, word in place.words})
    weight = {word: np.log((len(others) + 1) / (held[word] + 0.5)) for p in (*around, *others) for _, word in p.words}
    telling = {word for word, count in held.items() if count <= max(1, COMMON * len(others))}
    behind = context.diff.spans[0].new_end
    later = sorted((p for p in (*around, *others) if p.end > behind), key=lambda place: place.start)

    put_in, taken_out = edited_words(context)
    edited = dict.fromkeys(taken_out, TAKEN_OUT) | dict.fromkeys(put_in, PUT_IN)
    value = dict.fromkeys({word for place in around for _, word in place.words} & telling, BESIDE)
    value |= {word: worth for word, worth in edited.items() if word in telling} or edited
    hubs = _ranked(later, value, weight)[:HUBS]
    for place in hubs:
        yield place, _first_row(context, place, value)
    passed_on = {word for place in hubs for _, word in place.words} & telling
    value = dict.fromkeys(passed_on, PASSED_ON) | value
    for place in _ranked(later, value, weight):
        if place not in hubs:
            yield place, _first_row(context, place, value)


def linked_around(context: SelectionContext, found: Iterable[tuple[Place, int]]) -> Iterator[tuple[Place, int]]:
    """Places that hold an edited word, then those `found` in another way, then the other linked ones."""
    edited, tied = set.union(*edited_words(context)), list(linked_places(context))
    yield from (link for link in tied if any(word in edited for _, word in link[0].words))
    yield from found
    yield from tied


def outstanding(scores: np.ndarray, least: float) -> Iterator[int]:
    """Indices of the scores that lie more than `least` robust standard deviations above the median, highest first."""
    if not len(scores):
        return
    median = np.median(scores)
    spread = 1.4826 * np.median(np.abs(scores - median))
    for index in np.argsort(-scores, kind="stable").tolist():
        if scores[index] <= median + least * spread:
            return
        yield index


def _ranked(places: Iterable[Place], value: dict[str, float], weight: dict[str, float]) -> list[Place]:
    """The places that are tied by words of these values, best first."""
    shared = [(place, {word for _, word in place.words if word in value}) for place in places]
    # not all of them: the little words of a long sentence would outweigh a name
    scored = [(place, fsum(nlargest(STRONGEST, (value[w] * weight[w] for w in words)))) for place, words in shared]
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


def places_behind(context: SelectionContext) -> list[Place]:
    """Those that begin behind the first span."""
    behind = context.diff.spans[0].new_end
    return [place for place in places_of(context) if behind <= place.start < place.end]


def words_of(text: str, start: int, end: int) -> tuple[tuple[int, str], ...]:
    """Characters and case-folded words of `text[start:end]`."""
    found = ((match.start(), match[1] or match[2]) for match in WORD.finditer(text, start, end) if match[1] or match[2])
    return tuple((at, word.casefold()) for at, word in found)


def edited_words(context: SelectionContext) -> tuple[set[str], set[str]]:
    """Words that the edit put in, and words that it took out: those of one side of a span and not of the other."""
    put_in: set[str] = set()
    taken_out: set[str] = set()
    prefix = context.num_prefix
    for span in context.diff.spans:
        new = _touched(context.text, context.offsets, span.new_start - prefix, span.new_end - prefix)
        old = _touched(context.old_text, context.old_offsets, span.old_start - prefix, span.old_end - prefix)
        put_in |= new - old
        taken_out |= old - new
    return put_in, taken_out


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


def _parted(context: SelectionContext) -> tuple[list[Place], list[Place]]:
    """The places that hold the end of a span, and the others."""
    rows = np.array([max(span.new_end - 1, span.new_start) for span in context.diff.spans])
    around: list[Place] = []
    others: list[Place] = []
    for place in places_of(context):
        holds_any = np.searchsorted(rows, place.start) < np.searchsorted(rows, place.end)
        (around if holds_any else others).append(place)
    return around, others
