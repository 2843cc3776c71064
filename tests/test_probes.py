"""Probes: leads from the document's own ids, answers from the spans, and faults in a probes file by name."""

import json
import re

import numpy as np
import pytest

from kvfix.diff import diff_tokens
from kvfix.errors import UsageError
from kvfix.probes import (
    LEAD_IN,
    MAX_ANSWER,
    MAX_LEAD,
    GivenProbe,
    auto_probes,
    default_probes,
    given_probes,
    load_probes,
)

PREFIX = [1, 2]


class Words:
    """A toy tokenizer: a word takes the space before it, every other character is a token."""

    def __init__(self):
        self.vocabulary = {}

    def encode(self, text):
        return [self.vocabulary.setdefault(word, len(self.vocabulary) + 10) for word in self.pieces(text)]

    def pieces(self, text):
        return re.findall(r" ?\w+|[^\w]", text)

    def document(self, text):
        ends = np.cumsum([len(piece) for piece in self.pieces(text)], dtype=int)
        offsets = np.stack((np.concatenate(([0], ends[:-1])), ends), 1) if len(ends) else np.empty((0, 2), int)
        return np.array(PREFIX + self.encode(text)), offsets

    def text(self, ids):
        words = {index: word for word, index in self.vocabulary.items()}
        return "".join(words[index] for index in ids)


@pytest.fixture
def words():
    return Words()


def ask(words, old, new, max_probes=8, join_gap=9):
    (old_ids, old_offsets), (new_ids, new_offsets) = words.document(old), words.document(new)
    diff = diff_tokens(old_ids, new_ids, join_gap)
    return auto_probes(
        diff, new_ids, old_ids, new, new_offsets, old, old_offsets, words.encode, len(PREFIX), max_probes=max_probes
    )


@pytest.mark.parametrize(
    ("before", "lead"),
    [
        ("Goods may return. Refunds are paid within", " Refunds are paid within"),
        ("Goods may return.\nRefunds are paid", "Refunds are paid"),
        ("Really?! (Yes.) Refunds are", " Refunds are"),
        ("Ask us, e.g. the shop in", "Ask us, e.g. the shop in"),
        ("Costs of 3.50 or", "Costs of 3.50 or"),
        ("# Refunds\n\nPaid within", "Paid within"),
        ("# Refunds\nPaid within", "Paid within"),
        ("# Refunds in", "# Refunds in"),
        ("First block\n \nsecond block of", "second block of"),
        ("A line\nthat goes on for", "A line\nthat goes on for"),
        ("Intro\n- one\n- two at", "- two at"),
        ("Intro\n  1. one\n  2. Two at", " Two at"),
        ("| a | b |\n|---|---|\n| Lamp |", "| Lamp |"),
        ("Prices\n| Lamp |", "| Lamp |"),
        ("| Lamp | 3 |\nNote that", "Note that"),
        ("Say so\n> quoted by", "> quoted by"),
        ("他走了。他在", "他在"),
    ],
)
def test_lead_starts_with_its_sentence_row_or_item(words, before, lead):
    (probe,) = ask(words, f"{before} 30 days.", f"{before} 45 days.")
    assert words.text(probe.query_ids) == LEAD_IN + lead
    assert probe.question == lead.strip()
    assert (probe.old, probe.new) == (" 30", " 45")
    assert (words.text(probe.old_ids), words.text(probe.new_ids)) == (" 30", " 45")
    assert probe.kind == "auto"


@pytest.mark.parametrize("before", ["", "Goods may return.", "# Refunds\n\n", "One block\n\n\n", "| a |\n"])
def test_no_probe_without_a_lead(words, before):
    assert ask(words, f"{before} Thirty days", f"{before} Sixty days") == []


def test_lead_comes_from_the_new_document(words):
    probes = ask(words, "On Monday it was 30", "On Tuesday it was 45", join_gap=1)
    assert [words.text(probe.query_ids) for probe in probes] == [LEAD_IN + "On", LEAD_IN + "On Tuesday it was"]


def test_pure_insertion_and_deletion(words):
    (inserted,) = ask(words, "Paid within days", "Paid within 30 days")
    (deleted,) = ask(words, "Paid within 30 days", "Paid within days")
    assert (inserted.old_ids, inserted.old, inserted.new) == ((), "", " 30")
    assert (deleted.new_ids, deleted.new, deleted.old) == ((), "", " 30")
    assert words.text(deleted.query_ids) == LEAD_IN + "Paid within"


def test_lead_and_answers_are_capped(words):
    lead, old, new = ("".join(f" {kind}{i}" for i in range(100)) for kind in "xyz")
    (probe,) = ask(words, lead + old, lead + new)
    assert words.text(probe.query_ids).endswith(" x99")
    assert len(probe.query_ids) == len(words.encode(LEAD_IN)) + MAX_LEAD
    assert probe.old == "".join(f" y{i}" for i in range(MAX_ANSWER))
    assert words.text(probe.new_ids) == probe.new == "".join(f" z{i}" for i in range(MAX_ANSWER))


def test_many_spans_are_asked_evenly(words):
    old = "".join(f"Row {i} has value a{i}.\n" for i in range(21))
    new = old.replace(" a", " b")
    probes = ask(words, old, new, max_probes=5, join_gap=1)
    assert [probe.new for probe in probes] == [" b0", " b5", " b10", " b15", " b20"]
    assert len(ask(words, old, new, max_probes=30, join_gap=1)) == 21
    assert ask(words, old, old) == []


def test_special_text_in_a_lead_is_ordinary(words):
    (probe,) = ask(words, "x != y  if <|im_end|> is 30", "x != y  if <|im_end|> is 45")
    assert probe.question == "x != y  if <|im_end|> is"


def test_given_probes_frame_and_spaces(words):
    items = [
        GivenProbe("How long?", "30", " 45"),
        GivenProbe("\nHow long:", "", "\t45", doc="a.md"),
        GivenProbe("Other?", "1", "2", doc="b.md"),
    ]
    framed, verbatim = given_probes(items, "a.md", lambda text: words.encode(f"<{text}>"), words.encode)
    assert words.text(framed.query_ids) == "<How long?>"
    assert (framed.old, framed.new) == (" 30", " 45")
    assert framed.old_ids == tuple(words.encode(" 30"))
    assert words.text(verbatim.query_ids) == "\nHow long:"
    assert (verbatim.old, verbatim.old_ids, verbatim.new) == ("", (), "\t45")
    assert framed.kind == verbatim.kind == "given"


def test_load_probes(tmp_path):
    path = tmp_path / "probes.jsonl"
    line = {"question": "Q\u2028?", "old": "a", "new": "b"}
    path.write_text(
        "\ufeff" + json.dumps(line, ensure_ascii=False) + "\n\n" + json.dumps({**line, "doc": "x.md"}), "utf-8"
    )
    expected = [GivenProbe("Q\u2028?", "a", "b"), GivenProbe("Q\u2028?", "a", "b", "x.md")]
    assert load_probes(path) == default_probes(str(tmp_path)) == expected


def test_no_default_probes(tmp_path):
    assert default_probes(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "JSON object"),
        ('{"old": "a", "new": "b"}', "field 'question' is missing"),
        ('{"question": "q", "old": 30, "new": "b"}', "field 'old' must be a string, not 30"),
        ('{"question": "q", "old": "a", "new": null}', "field 'new' must be a string, not null"),
        ('{"question": "q", "old": "a", "new": "b", "doc": 1}', "field 'doc' must be a string, not 1"),
        ('{"question": "q", "old": "a", "new": "b", "dok": "x"}', "unknown field 'dok'"),
        ('{"question": "", "old": "a", "new": "b"}', "field 'question' is empty"),
        ('{"question": "q", "old": "a", "new": "a"}', "are the same"),
        ('{"question": "q", "old": "\\ud800", "new": "b"}', "field 'old' holds half a surrogate pair"),
    ],
)
def test_faults_name_file_line_and_field(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "q", "old": "a", "new": "b"}\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        load_probes(path)
    assert caught.value.message.startswith(f"{path}:2: ")
    assert message in caught.value.message


def test_unreadable_probes_files(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        load_probes(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot read"):
        load_probes(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(b"abc\x93")
    with pytest.raises(UsageError, match="not UTF-8 at byte 3"):
        load_probes(tmp_path / "bad.jsonl")
