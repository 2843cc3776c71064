"""Linked against a slow, obvious twin, and where its rows go."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfix.selectors import SelectionContext, get_selector, make_plan
from tests.selectors.contexts import PREFIX, between, context_of, diff_of, diffs, select, text_of
from tests.selectors.test_links import ASIDE, FERRIES, RECORD


def window_by_hand(context: SelectionContext, num_rows: int, taken: set[int]) -> set[int]:
    """What EditLocal takes of the rows that are not taken, row by row."""
    spans = context.diff.spans
    chosen: set[int] = set()
    for n, span in enumerate(spans):
        share = num_rows // len(spans) + (n < num_rows % len(spans))
        for row in range(span.new_end, context.diff.num_new):
            if share and context.free[row] and row not in taken | chosen:
                chosen.add(row)
                share -= 1
    return chosen


def places_by_hand(context: SelectionContext) -> list[list[tuple[int, str]]]:
    """Sentences of plain words with a full stop: each row with its word."""
    places: list[list[tuple[int, str]]] = [[]]
    for row, (low, high) in enumerate(context.offsets, context.num_prefix):
        places[-1].append((row, context.text[low:high].strip(" .").lower()))
        if context.text[low:high] == ".":
            places.append([])
    return [place for place in places if any(word for _, word in place)]


def ties_by_hand(context: SelectionContext) -> list[tuple[int, int, int]]:
    """Start, end and telling row of each tied place, best first."""
    places = places_by_hand(context)
    spans = context.diff.spans
    new_words = {row: word for place in places for row, word in place}
    old_words = [context.old_text[low:high].strip(" .").lower() for low, high in context.old_offsets]
    put_in: set[str] = set()
    taken_out: set[str] = set()
    for span in spans:
        # the word in front of a span touches it
        new = {new_words.get(row, "") for row in range(span.new_start - 1, span.new_end)}
        old = {old_words[max(row - context.num_prefix, 0)] for row in range(span.old_start - 1, span.old_end)}
        put_in |= new - old - {""}
        taken_out |= old - new - {""}
    ends = {max(span.new_end - 1, span.new_start) for span in spans}
    beside = {word for place in places if ends & {row for row, _ in place} for _, word in place}
    others = [place for place in places if not ends & {row for row, _ in place}]
    held = {word: sum(word in dict(place).values() for place in others) for word in {*new_words.values()} - {""}}
    telling = {word for word in held if 0 < held[word] <= max(1, 0.2 * len(others))}
    if (put_in | taken_out) & telling:
        put_in, taken_out = put_in & telling, taken_out & telling

    def value(word: str, passed_on: set[str]) -> float:
        if word in put_in:
            return 1.0
        if word in taken_out:
            return 0.99
        if word in beside & telling:
            return 0.3
        return 0.5 if word in passed_on & telling else 0.0

    def ranked(passed_on: set[str]) -> list:
        scored = []
        for place in places:
            words = {word for _, word in place} - {""}
            worth = [value(w, passed_on) * np.log((len(others) + 1) / (held[w] + 0.5)) for w in words]
            score = math.fsum(sorted(worth)[-2:])
            if place[-1][0] + 1 > spans[0].new_end and score >= 1.0:
                scored.append((-score, place))
        return [place for _, place in sorted(scored)]

    def entry(place: list, passed_on: set[str]) -> tuple[int, int, int]:
        return place[0][0], place[-1][0] + 1, next(row for row, word in place if value(word, passed_on))

    hubs = ranked(set())[:4]
    passed_on = {word for place in hubs for _, word in place}
    return [
        *(entry(place, set()) for place in hubs),
        *(entry(place, passed_on) for place in ranked(passed_on) if place not in hubs),
    ]


def linked_by_hand(context: SelectionContext) -> list[int]:
    near = window_by_hand(context, int(0.25 * context.num_rows), set())
    linked: set[int] = set()
    for start, end, row in ties_by_hand(context):
        first = start if row - start <= 6 else row - 2
        open_rows = [r for r in range(first, end) if context.free[r] and r not in near | linked]
        linked.update(open_rows[: min(12, context.num_rows - len(near) - len(linked))])
    chosen = linked | window_by_hand(context, context.num_rows - len(linked), linked)
    missed = sorted(window_by_hand(context, context.num_rows, set()) - chosen)
    return sorted({*chosen, *missed[: context.num_rows - len(chosen)]})


WORDS = (
    "oak", "fir", "elm", "ash", "yew", "box", "bay", "fig", "nut", "pear",
    "plum", "rye", "hop", "kale", "leek", "oats", "beet", "corn", "dill", "mint",
)  # fmt: skip


@st.composite
def edits(draw) -> SelectionContext:
    """A document of short and long sentences in which some words were put in, taken out or replaced."""
    rarely = st.sampled_from([*WORDS, *WORDS[:4] * 4])
    sentences = draw(st.lists(st.lists(rarely, min_size=1, max_size=16), min_size=1, max_size=30))
    changed = [list(sentence) for sentence in sentences]
    for _ in range(draw(st.integers(1, 4))):
        sentence = changed[draw(st.integers(0, len(changed) - 1))]
        at = draw(st.integers(0, len(sentence)))
        sentence[at : at + draw(st.integers(0, 2))] = draw(st.lists(rarely, max_size=2))

    def text(parts: list) -> str:
        return " ".join(" ".join(part).capitalize() + "." for part in parts if part)

    return between(text(sentences), text(changed), draw(st.integers(0, 40)), draw(st.none() | st.integers(0, 60)))


@given(edits())
def test_linked_equals_the_slow_one(context):
    if not context.diff.spans:
        return
    assert select("linked", context) == linked_by_hand(context)


# ---- the budget


@given(edits())
def test_what_linked_owes(context):
    diff = context.diff
    if not diff.spans:
        return
    rows, local = select("linked", context), select("editlocal", context)
    assert len(local) <= len(rows) <= context.num_rows
    if len(diff.spans) == 1 or diff.num_new - diff.spans[-1].new_end >= context.num_rows:
        assert len(rows) == min(context.num_rows, int(context.free.sum()))
    assert window_by_hand(context, context.num_rows // 4, set()) <= set(rows)


@given(diffs(), st.integers(0, 40), st.none() | st.integers(0, 60))
def test_without_a_link_linked_is_editlocal(diff, k, cap):
    """One word, and no place in which it stands again; all of it for any number of spans."""
    context = context_of(diff, k, cap)
    assert select("linked", context) == select("editlocal", context)


@pytest.mark.parametrize(("k", "near"), [(0, 0), (3, 0), (4, 1), (32, 8), (33, 8)])
def test_a_quarter_is_for_the_rows_behind_the_span(k, near):
    """Places enough take all of the rest."""
    rest = ASIDE + "Orion is far away. " * 20
    before, after = (
        f"Zone {alias}. Much else is said about nothing at all here. {rest}" for alias in ("Helios", "Orion")
    )
    context = between(before, after, k)
    end = context.diff.spans[0].new_end
    rows = select("linked", context)
    # the full stop behind the span is of the tied place itself
    assert rows[: max(near, k > 0)] == list(range(end, end + max(near, k > 0)))
    assert len(rows) == k


# ---- the windows


def linked(before: str, after: str, k: int, **settings) -> list[str]:
    context = between(before, after, k)
    return text_of(context, select("linked", context, **settings))


def rows_far(old: str, new: str, rest: str, k: int = 32, record: str = RECORD) -> list[str]:
    """What is selected of `rest`, which stands far behind the edit."""
    before, after = (record.format(alias) + ASIDE + rest for alias in (old, new))
    context = between(before, after, k)
    start = len(after) - len(rest)
    rows = [row for row in select("linked", context) if context.offsets[row - PREFIX][0] >= start - 1]
    return [said.strip() for said in text_of(context, rows)]


def test_a_table_row_is_taken_from_its_start():
    table = "\n\n| desk | who | city |\n|---|---|---|\n| red room | Orion | Nile |\n| blue hall | Vega | Seine |\n"
    assert rows_far("Helios", "Orion", table) == ["| red room | Orion | Nile |"]


def test_a_mention_late_in_a_sentence_is_taken_from_two_rows_before():
    rest = "Under ancient umbrellas beside quiet wharves sleeps old grey Orion with seven cats. Then nothing."
    assert rows_far("Helios", "Orion", rest) == ["old grey Orion with seven cats."]


def test_a_mention_within_the_lead_is_taken_from_the_start():
    rest = "Under ancient umbrellas beside quiet wharves Orion sleeps. Then nothing."
    assert rows_far("Helios", "Orion", rest) == ["Under ancient umbrellas beside quiet wharves Orion sleeps."]


def test_a_window_is_twelve_rows():
    rest = "Orion " + " ".join(f"q{n}" for n in range(30)) + "."
    assert rows_far("Helios", "Orion", rest) == ["Orion " + " ".join(f"q{n}" for n in range(11))]


def test_a_place_has_one_window():
    """Also a long one whose words are passed on."""
    rest = "Orion " + " ".join(f"q{n}" for n in range(30)) + f". {ASIDE}Say q1 q2 q3 q4."
    assert rows_far("Helios", "Orion", rest) == ["Orion " + " ".join(f"q{n}" for n in range(11)), "Say q1 q2 q3 q4."]


def test_a_window_skips_a_later_span():
    before = RECORD.format("Helios") + ASIDE + "Orion likes {} and tea."
    context = between(before.format("milk"), before.replace("Helios", "Orion").format("rum"), 16)
    assert len(context.diff.spans) == 2
    rows = select("linked", context)
    assert text_of(context, rows)[-2:] == [" Orion likes", " and tea."]


def test_ideographs():
    before, after = ("船票由" + who + "收取。" + FERRIES + "听说港务局在东边。" for who in ("财务处", "港务局"))
    assert linked(before, after, 24)[-1] == "听说港务局在东边。"


def test_windows_line_ends():
    rest = "\r\n\r\nNothing here\r\n\r\n- Orion item\r\n- other\r\n"
    assert rows_far("Helios", "Orion", rest) == ["- Orion item"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("Helios", "Orion"), ("Orion ", ""), ("", "Orion ")],
    ids=["replaced", "deleted", "inserted"],
)
@pytest.mark.parametrize("where", ["start", "end"])
def test_spans_at_the_ends(old, new, where):
    rest = f"is the zone. {ASIDE}Orion is far. "
    texts = (f"{word} {rest}" if where == "start" else f"{rest}In {word}" for word in (old, new))
    context = between(*texts, 24)
    rows = select("linked", context)
    said = "".join(text_of(context, rows))
    assert ("Orion is far." in said) is (where == "start")
    assert len(rows) == min(24, context.free.sum())


@pytest.mark.parametrize("change", [("zone.", "zone!"), ("Helios zone", "Helios  zone"), ("Helios", "Helios,")])
def test_marks_and_white_space_tie_nothing_by_themselves(change):
    before = RECORD.format("Helios") + ASIDE + "Helios is far. "
    context = between(before, before.replace(*change, 1), 16)
    assert select("linked", context) == select("editlocal", context)


@pytest.mark.parametrize(
    ("before", "after"), [("one two three", ""), ("", "one two"), ("One two.", "One six."), ("a", "b")]
)
@pytest.mark.parametrize("prefix", [0, 3])
def test_short_documents(before, after, prefix):
    context = between(before, after, 8, prefix=prefix)
    assert select("linked", context) == np.flatnonzero(context.free).tolist()


def test_a_plan_of_several_spans():
    record = "Zone of {}. " + ASIDE + "Crew of {}. " + ASIDE
    rest = "Vega is far. Orion is near. "
    context = between(record.format("Helios", "Rigel") + rest, record.format("Orion", "Vega") + rest, 16)
    plan = make_plan(get_selector("linked"), context)
    said = text_of(context, plan.positions)
    assert said[-1].strip() == "Vega is far. Orion is near."
    assert len(plan.positions) == 2 * 16 + 2


def test_shares_of_an_odd_budget_are_editlocals():
    """Two shares of one quarter and of the rest are not those of the whole."""
    context = context_of(diff_of(90, (10, 1, 1), (40, 1, 1)), 3)
    assert select("linked", context) == [11, 12, 13, 41, 42, 43]
