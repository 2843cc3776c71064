"""Which places an edit is tied to, in which order, and by which word."""

import os
import re
import subprocess
import sys

import pytest

from kvfix.selectors import SelectionContext
from kvfix.selectors.links import linked_places, words_of
from tests.selectors.contexts import between, text_of

RECORD = "The billing service runs in the {} zone. "
ASIDE = 5 * "Ferries leave at noon. Children pay half fare. Dogs travel free. Nobody may smoke. "
FERRIES = 5 * "渡轮在中午开出。狗可以免费。不准吸烟。孩子半价。"
DIGITS = re.compile(r" ?[^\W\d]+|.", re.DOTALL)


def tied(before: str, after: str, token: re.Pattern | None = None) -> list[str]:
    """The tied places' texts, best first, white space around them left out."""
    context = between(before, after, 8, **({} if token is None else {"token": token}))
    found = [range(place.start, place.end) for place, _ in linked_places(context)]
    return ["".join(text_of(context, rows)).strip() for rows in found]


def edited(old: str, new: str, rest: str, record: str = RECORD) -> list[str]:
    """The same for a record in which `old` became `new`; `rest` stands behind it."""
    first = record.format(new).strip()
    return [place for place in tied(record.format(old) + rest, record.format(new) + rest) if place not in first]


# ---- words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Helios, helios!", ["helios", "helios"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("max_size=30.5", ["max_size", "30", "5"]),
        ("", []),
        (" .,|", []),
        ("港口费用", ["港口", "口费", "费用"]),
        ("a港口b", ["a", "港口", "b"]),
        ("港", []),
        ("フェリー乗り場", ["フェ", "ェリ", "リー", "ー乗", "乗り", "り場"]),
    ],
)
def test_words(text, words):
    assert [word for _, word in words_of(text, 0, len(text))] == words
    assert [word for _, word in words_of(f"xx {text} xx", 3, 3 + len(text))] == words


def test_words_know_their_characters():
    assert words_of("ab, CD 港口费", 0, 10) == ((0, "ab"), (4, "cd"), (7, "港口"), (8, "口费"))


# ---- what ties


def test_mentions_of_the_old_and_of_the_new_word():
    rest = ASIDE + "Helios is near. Orion is far. Juniper is big. "
    assert edited("Helios", "Orion", rest) == ["Orion is far.", "Helios is near."], "what was put in comes first"


def test_nothing_is_tied_by_other_words():
    assert edited("Helios", "Orion", ASIDE) == []


def test_what_stands_before_the_edit_is_not_a_place():
    head = "Helios is near. Orion is far. "
    assert edited("Helios", "Orion", ASIDE, head + RECORD) == []


def test_words_are_compared_without_regard_to_case():
    assert edited("Helios", "Orion", ASIDE + "HELIOS burns. ") == ["HELIOS burns."]


def test_a_part_of_a_word_is_no_mention():
    assert edited("Helios", "Orion", ASIDE + "Heliosphere burns. ") == []


def test_rows_items_and_headings_are_places():
    table = "| zone | gate |\n|---|---|\n| Helios | one |\n| Velvet | two |\n"
    rest = f"\n\n# Helios\n\n- Helios item\n- other thing\n\n{table}{ASIDE}"
    assert edited("Helios", "Orion", rest) == ["# Helios", "- Helios item", "| Helios | one |"]


def test_windows_line_ends():
    parts = (ASIDE, "Nothing here", "Helios paragraph", "- Helios item\r\n- other", "| Helios | 1 |\r\n| x | 2 |")
    rest = "".join(f"\r\n\r\n{part}" for part in parts)
    assert edited("Helios", "Orion", rest) == ["Helios paragraph", "- Helios item", "| Helios | 1 |"]


def test_ideographs_are_tied_by_pairs():
    rest = FERRIES + "港务局在东边。财务处在西边。"
    found = edited("财务处", "港务局", rest, "船票由{}收取。")
    assert sorted(found) == sorted(["港务局在东边。", "财务处在西边。"])


def test_taken_out_of_ideographs():
    rest = FERRIES + "公爵住在这里。"
    assert edited("公爵", "", rest, "欢迎你去北京{}饭店吃饭。") == ["公爵住在这里。"]


@pytest.mark.parametrize(
    ("before", "after", "tying"),
    [
        ("the zone", "the Helios zone", ["helios"]),  # put in
        ("the Helios zone", "the zone", ["helios"]),  # taken out
        ("the Helios zone", "the  Helios zone", []),
        ("the Helios zone", "the Helios, zone", []),
        ("the Helios zone", "the Helios\nzone", []),
        ("the HELIOS zone", "the Helios zone", []),
        ("the Helios zone", "the Orion zone", ["helios", "orion"]),
        ("port 80 is", "port 8080 is", ["80", "8080"]),  # lengthened
        ("port 8080.", "port 80.", ["80", "8080"]),
        ("limit 30 is", "limit 300 is", ["30", "300"]),
        ("the max_size key", "the min_size key", ["max_size", "min_size"]),
        ("the Heliosphere", "the Helios phere", ["helios", "heliosphere", "phere"]),
        ("the Helios", "the ", ["helios"]),
        ("the fee", "the fee Helios", ["helios"]),
    ],
)
@pytest.mark.parametrize("token", [None, DIGITS, re.compile(".", re.DOTALL)])
def test_words_that_the_edit_put_in_or_took_out(before, after, tying, token):
    """However the text is cut into tokens; each such word ties a sentence of its own."""
    words = ["80", "8080", "30", "300", "helios", "orion", "heliosphere", "phere", "max_size", "min_size", "the", "max"]
    rest = "\n\n" + ASIDE + "".join(f"Xx {word} q{n}. " for n, word in enumerate(words) if word != "the")
    found = [place for place in tied(before + rest, after + rest, token) if place.startswith("Xx")]
    assert sorted(place.split()[1] for place in found) == tying


def test_a_common_word_of_the_sentence_ties_nothing():
    rest = "".join(f"Service number {n} is down. " for n in range(9)) + ASIDE
    assert edited("Helios", "Orion", rest) == []


def test_words_of_the_edited_sentence_tie_too():
    """Two rare ones do; each counts less than an edited word."""
    rest = ASIDE + "Billing zone closed. Orion is far. "
    assert edited("Helios", "Orion", rest) == ["Orion is far.", "Billing zone closed."]


def test_an_edited_word_ties_even_where_it_is_common_but_not_where_it_is_everywhere():
    some = "".join(f"Helios q{n} shines. Other z{n} text. Also y{n} here. " for n in range(6))
    assert len([place for place in edited("Helios", "Orion", some) if place.startswith("Helios")]) == 6
    always = "".join(f"Helios q{n}. " for n in range(30))
    assert edited("Helios", "Orion", always) == []


def test_the_rarer_word_comes_first_and_ties_stay_in_order():
    rest = ASIDE + "Helios one. Helios two. Helios three. Orion four. "
    assert edited("Helios", "Orion", rest) == ["Orion four.", "Helios one.", "Helios two.", "Helios three."]


# ---- the second hop


def test_a_place_tied_to_a_tied_place_comes_after_it():
    rest = "Thunder team, gate Nile. " + ASIDE + "Orion is led by Thunder. Meadow team, gate Seine. "
    assert edited("Helios", "Orion", rest) == ["Orion is led by Thunder.", "Thunder team, gate Nile."]


def test_a_third_hop_is_not_taken():
    rest = "Nile water looks brown. " + ASIDE + "Thunder team, gate Nile. Orion is led by Thunder. "
    assert edited("Helios", "Orion", rest) == ["Orion is led by Thunder.", "Thunder team, gate Nile."]


def test_a_common_word_is_not_passed_on():
    rest = "".join(f"Thunder q{n} rolls. " for n in range(9)) + ASIDE + "Orion hears Thunder. "
    assert edited("Helios", "Orion", rest) == ["Orion hears Thunder."]


def test_every_place_comes_once():
    rest = ASIDE + "Helios lies by Thunder river near Castle hill. Thunder and Castle fell. "
    found = tied(RECORD.format("Helios") + rest, RECORD.format("Orion") + rest)
    assert len(found) == len(set(found)) == 2


# ---- the row of the word


def test_the_row_is_that_of_the_word_that_ties():
    """Also for a place that passes words on: they are its own and tie it to nothing."""
    rest = ASIDE + "Under ancient umbrellas, beside quiet wharves, sleeps old Orion. "
    context = between(RECORD.format("Helios") + rest, RECORD.format("Orion") + rest, 8)
    rows = [row for place, row in linked_places(context) if "umbrellas" in {word for _, word in place.words}]
    assert text_of(context, rows) == [" Orion"]


# ---- corners


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one two three", ""),
        ("", "one two three"),
        ("", "\n"),
        ("one", "two"),
        ("one two.", "one two"),
        ("One two.", "New. One two."),
        ("One two.", "One two. New."),
        ("...", "..!"),
        ("one two", "one  two"),
    ],
)
@pytest.mark.parametrize("prefix", [0, 2])
def test_short_documents(before, after, prefix):
    context = between(before, after, 8, prefix=prefix)
    for place, row in linked_places(context):
        assert prefix <= place.start <= row < max(place.end, row + 1) <= context.diff.num_new


def test_without_the_old_text_the_new_words_tie():
    """Where nobody has said what the document was."""
    rest = ASIDE + "Orion is far. "
    context = between(RECORD.format("Helios") + rest, RECORD.format("Orion") + rest, 8)
    bare = SelectionContext(context.diff, context.budget, context.text, context.offsets, context.num_prefix)
    *_, (place, row) = linked_places(bare)
    assert text_of(bare, range(place.start, place.end)) == [" Orion is far."]
    assert text_of(bare, [row]) == [" Orion"]


SCRIPT = """
from kvfix.selectors.links import linked_places
from tests.selectors.contexts import between
words = ["oak", "fir", "elm", "ash", "yew", "box", "bay", "fig", "nut", "pear"]
rest = "".join("Say " + " ".join(words[n:] + words[:n]) + f" q{n}. " for n in range(10)) + "Else here. " * 60
context = between("Oak fir elm ash yew box bay fig nut pear is 1. " + rest, "Is 2. " + rest, 8)
print([place.start for place, _ in linked_places(context)])
"""


def test_the_order_does_not_depend_on_how_strings_are_hashed():
    """Places that hold the same words are equally good, whichever way their values are added up."""
    said = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1
