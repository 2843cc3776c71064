"""Markdown blocks: their kinds and ends, exactly, and no character without a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfix.selectors.blocks import Block, block_end, blocks


def pieces(text: str) -> list[tuple[str, str]]:
    """Kind and text of every block."""
    return [(block.kind, text[block.start : block.end]) for block in blocks(text)]


CASES = {
    "nothing": ("", []),
    "one line": ("a line", [("text", "a line")]),
    "paragraphs": ("one\ntwo\n\nthree\n", [("text", "one\ntwo\n\n"), ("text", "three\n")]),
    "blank lines of spaces": ("one\n  \t\n\ntwo", [("text", "one\n  \t\n\n"), ("text", "two")]),
    "blank lines in front": ("\n\none\n\ntwo", [("text", "\n\none\n\n"), ("text", "two")]),
    "blank lines only": ("\n \n", [("text", "\n \n")]),
    "windows line ends": ("one\r\ntwo\r\n\r\nthree\r\n", [("text", "one\r\ntwo\r\n\r\n"), ("text", "three\r\n")]),
    "a list": ("- a\n- b\n\ntext", [("list", "- a\n- b\n\n"), ("text", "text")]),
    "a list with blank lines": ("- a\n\n- b\n\n- c\n\ntext", [("list", "- a\n\n- b\n\n- c\n\n"), ("text", "text")]),
    "a numbered list": ("1. a\n\n2) b\n\nc", [("list", "1. a\n\n2) b\n\n"), ("text", "c")]),
    "a list with paragraphs": ("- a\n\n  more\n\n- b\n\nc", [("list", "- a\n\n  more\n\n- b\n\n"), ("text", "c")]),
    "a list behind a paragraph": ("text:\n\n* a\n* b\n", [("text", "text:\n\n"), ("list", "* a\n* b\n")]),
    "a star that is no list": ("**bold** text\n\n*more*", [("text", "**bold** text\n\n"), ("text", "*more*")]),
    "a table": (
        "| a | b |\n|---|---|\n| 1 | 2 |\n\nafter",
        [("text", "| a | b |\n|---|---|\n| 1 | 2 |\n\n"), ("text", "after")],
    ),
    "code": ("```\na\n\nb\n```\n\nafter", [("code", "```\na\n\nb\n```\n\n"), ("text", "after")]),
    "code with a comment": (
        "```python\n# no heading\n\n# nor this\n```\n\n# heading\n",
        [("code", "```python\n# no heading\n\n# nor this\n```\n\n"), ("heading", "# heading\n")],
    ),
    "code in tildes": ("~~~\na\n\n```\n\nb\n~~~\n\nc", [("code", "~~~\na\n\n```\n\nb\n~~~\n\n"), ("text", "c")]),
    "code in four marks": ("````\n```\n\n```\n\n````\n\nc", [("code", "````\n```\n\n```\n\n````\n\n"), ("text", "c")]),
    "code that ends with more marks": ("```\na\n\n`````\n\nb", [("code", "```\na\n\n`````\n\n"), ("text", "b")]),
    "a mark with words does not end code": (
        "```\na\n\n```python\n\nb\n```\n\nc",
        [("code", "```\na\n\n```python\n\nb\n```\n\n"), ("text", "c")],
    ),
    "code that never ends": ("```\na\n\nb\n\n# c", [("code", "```\na\n\nb\n\n# c")]),
    "code in line": (
        "```one``` word\n\ntwo\n\n# three",
        [("text", "```one``` word\n\n"), ("text", "two\n\n"), ("heading", "# three")],
    ),
    "code in a list": (
        "- a\n\n  ```\n  x\n\n  y\n  ```\n\n- b\n\nc",
        [("list", "- a\n\n  ```\n  x\n\n  y\n  ```\n\n- b\n\n"), ("text", "c")],
    ),
    "headings": (
        "# A\n\ntext\n\n## B\nmore\n",
        [("heading", "# A\n\n"), ("text", "text\n\n"), ("heading", "## B\n"), ("text", "more\n")],
    ),
    "a heading without a blank line": ("text\n# A\ntext", [("text", "text\n"), ("heading", "# A\n"), ("text", "text")]),
    "marks that are no heading": ("#tag\n\n####### seven", [("text", "#tag\n\n"), ("text", "####### seven")]),
    "front matter": (
        "---\ntitle: A\ntags:\n- x\n- y\n---\n\n# A\n",
        [("text", "---\ntitle: A\ntags:\n- x\n- y\n---\n\n"), ("heading", "# A\n")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks(name):
    text, expected = CASES[name]
    assert pieces(text) == expected


@pytest.mark.parametrize("name", [name for name in CASES if "\r" not in CASES[name][0]])
def test_line_ends_do_not_matter(name):
    text, expected = CASES[name]
    windows = text.replace("\n", "\r\n")
    assert pieces(windows) == [(kind, piece.replace("\n", "\r\n")) for kind, piece in expected]


lines = st.sampled_from(
    [
        "",
        " ",
        "text",
        "# H",
        "## H",
        "- item",
        "  more",
        "1. one",
        "| a |",
        "```",
        "~~~",
        "```py",
        "---",
        "\tx",
        "#",
        "é漢",
    ]
)
texts = st.lists(st.tuples(lines, st.sampled_from(["\n", "\r\n"])).map("".join)).map("".join)


@given(st.one_of(texts, st.text()))
def test_no_gap_and_no_overlap(text):
    found = blocks(text)
    assert [block.start for block in found] == [0, *(block.end for block in found)][: len(found)]
    assert (found[-1].end if found else 0) == len(text)
    assert all(block.start < block.end for block in found)


@given(texts)
def test_a_block_ends_behind_every_character_of_it(text):
    for character in range(len(text)):
        end = block_end(text, character)
        assert character < end <= len(text)


SECTIONS = "# A\n\nintro\n\n## B\n\nb1\n\nb2\n\n### C\n\nc\n\n## D\n\nd\n\n# E\n\ne\n"


@pytest.mark.parametrize(
    ("at", "until"),
    [
        ("# A", "# E"),
        ("intro", "## B"),
        ("## B", "## D"),
        ("b1", "b2"),
        ("b2", "### C"),
        ("### C", "## D"),
        ("## D", "# E"),
        ("# E", None),
        ("e\n", None),
    ],
)
def test_a_heading_ends_with_its_section(at, until):
    start = len(SECTIONS) - 2 if at == "e\n" else SECTIONS.index(at)
    expected = len(SECTIONS) if until is None else SECTIONS.index(until)
    assert block_end(SECTIONS, start) == expected
    assert block_end(SECTIONS, start + 1) == expected or at == "e\n"


@pytest.mark.parametrize(("text", "character", "end"), [("", 0, 0), ("one\n\ntwo", 8, 8), ("one\n\ntwo", 99, 8)])
def test_behind_the_end(text, character, end):
    assert block_end(text, character) == end


def test_headings_carry_their_level():
    assert [b.level for b in blocks("# A\n\n### B\n\n###### C\n\ntext")] == [1, 3, 6, 0]
    assert blocks("x") == (Block(0, 1, "text", 0),)
