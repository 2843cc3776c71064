"""The sample corpus keeps its promises: counts, unique places of edits, answers, links, front matter, sizes."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CORPORA = Path(__file__).parents[1] / "corpora"
HANDBOOK = CORPORA / "handbook"
DOCS = sorted(path.relative_to(HANDBOOK).as_posix() for path in HANDBOOK.rglob("*.md"))
LENGTHS = ("same-length", "growing", "shrinking")
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read(doc: str) -> str:
    return (HANDBOOK / doc).read_bytes().decode("utf-8", errors="strict")


def applied(edit: dict[str, Any]) -> str:
    text = read(edit["doc"])
    for replacement in edit["replacements"]:
        assert text.count(replacement["find"]) == 1, (edit["id"], replacement["find"])
        text = text.replace(replacement["find"], replacement["replace"])
    return text


EDITS = {edit["id"]: edit for edit in lines(CORPORA / "handbook_edits.jsonl")}
PROBES = lines(HANDBOOK / "probes.jsonl")


def tables(text: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in CODE.sub("", text).splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


def test_counts() -> None:
    assert len(DOCS) == 18
    assert len(EDITS) == len(lines(CORPORA / "handbook_edits.jsonl")) >= 30
    assert len(PROBES) >= 40
    assert {path.suffix for path in HANDBOOK.rglob("*") if path.is_file()} == {".md", ".jsonl"}
    assert {probe["kind"] for probe in PROBES} == {"direct", "derived"}
    assert {edit["doc"] for edit in EDITS.values()} == set(DOCS)


def test_sizes() -> None:
    sizes = sorted(len(read(doc)) for doc in DOCS)
    assert 1_100 <= sizes[0] <= sizes[-1] <= 18_500
    assert sum(size < 2_600 for size in sizes) >= 4
    assert sum(3_000 <= size <= 7_500 for size in sizes) >= 9
    assert sum(8_000 <= size <= 12_500 for size in sizes) == 3


def test_edits_of_every_kind() -> None:
    tags = Counter(tag for edit in EDITS.values() for tag in edit["tags"])
    least = {
        "same-length": 8,
        "growing": 6,
        "shrinking": 5,
        "several-spans": 4,
        "first-token": 2,
        "last-line": 2,
        "insert-row": 1,
        "insert-paragraph": 1,
        "delete-paragraph": 1,
        "delete-item": 1,
        "table-cell": 1,
        "front-matter": 1,
        "rename": 1,
    }
    assert {tag: tags[tag] for tag in least if tags[tag] < least[tag]} == {}


@pytest.mark.parametrize("doc", DOCS)
def test_document(doc: str) -> None:
    text = read(doc)
    assert text.endswith("\n")
    assert not text.startswith("\ufeff")
    assert "\r" not in text
    assert text.count("```") % 2 == 0
    assert tables(text)
    for rows in tables(text):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]


@pytest.mark.parametrize("doc", DOCS)
def test_links_resolve(doc: str) -> None:
    for target in LINK.findall(CODE.sub("", read(doc))):
        path = ((HANDBOOK / doc).parent / target).resolve()
        assert path.relative_to(HANDBOOK.resolve()).as_posix() in DOCS, target


def test_documents_are_linked() -> None:
    linked = [doc for doc in DOCS if LINK.search(CODE.sub("", read(doc)))]
    assert len(linked) >= 16


@pytest.mark.parametrize("edited", [None, *EDITS])
def test_front_matter_parses(edited: str | None) -> None:
    yaml = pytest.importorskip("yaml")
    texts = [read(doc) for doc in DOCS] if edited is None else [applied(EDITS[edited])]
    with_front_matter = [text for text in texts if text.startswith("---\n")]
    for text in with_front_matter:
        fields = yaml.safe_load(text[4:].split("\n---\n", 1)[0])
        assert fields["title"]
        assert fields.get("owner") or fields.get("updated")
    assert edited is not None or len(with_front_matter) >= 12


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edit(edit: dict[str, Any]) -> None:
    old, new = read(edit["doc"]), applied(edit)
    assert old != new
    assert new.endswith("\n")
    assert edit["note"].endswith(".")
    assert edit["kind"] in edit["tags"]
    for replacement in edit["replacements"]:
        assert old.count(replacement["find"]) == 1
    before, after = edit["tokens"]
    expected = LENGTHS[0] if before == after else LENGTHS[1] if before < after else LENGTHS[2]
    assert [tag for tag in edit["tags"] if tag in LENGTHS] == [expected]
    if "several-spans" in edit["tags"]:
        assert 2 <= len(edit["replacements"]) <= 5
    if "first-token" in edit["tags"]:
        assert old[:5] != new[:5]
    if "last-line" in edit["tags"]:
        assert old.splitlines()[-1] != new.splitlines()[-1]
    if "front-matter" in edit["tags"]:
        assert old.split("\n---\n", 1)[0] != new.split("\n---\n", 1)[0]
    if "insert-row" in edit["tags"]:
        assert sum(map(len, tables(new))) == sum(map(len, tables(old))) + 1


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: f"{probe['edit']}: {probe['question']}")
def test_probe(probe: dict[str, Any]) -> None:
    edit = EDITS[probe["edit"]]
    assert probe["doc"] == edit["doc"]
    before, after = read(probe["doc"]), applied(edit)
    old, new = probe["old"], probe["new"]
    assert old.lower() not in new.lower()
    assert new.lower() not in old.lower()
    assert max(len(old), len(new)) <= 24
    assert old in before
    assert new in after
    if probe["kind"] == "direct":
        assert before.count(old) > after.count(old)
        assert after.count(new) > before.count(new)
        assert "distance" not in probe
    else:  # the rows that give the answers stay as they are
        assert before.count(old) == after.count(old) >= 1
        assert before.count(new) == after.count(new) >= 1
        assert probe["distance"] in ("near", "far")
        assert probe["distance"] in edit["distance"]


def test_probes_are_distinct() -> None:
    assert len({(probe["doc"], probe["question"], probe["edit"]) for probe in PROBES}) == len(PROBES)
    kinds = Counter(probe["kind"] for probe in PROBES)
    assert kinds["direct"] >= 25
    assert kinds["derived"] >= 12
    assert sum(probe.get("distance") == "far" for probe in PROBES) >= 3


def test_token_counts() -> None:
    """With the demo model's tokenizer at hand (a folder named by KVFIX_MODEL), count again."""
    file = Path(os.environ.get("KVFIX_MODEL", "")) / "tokenizer.json"
    if not file.is_file():
        pytest.skip("KVFIX_MODEL names no folder with a tokenizer.json")
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size() != 49_152:
        pytest.skip("not the demo model's tokenizer")

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    counted = {name: [count(read(edit["doc"])), count(applied(edit))] for name, edit in EDITS.items()}
    assert counted == {name: edit["tokens"] for name, edit in EDITS.items()}
