"""The handbook's scripted past: each edit applies to what those before it left, and all together are like real ones."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfix.bench.history import open_history
from kvfix.bench.replay import Replay, ReplayOptions
from kvfix.bench.replay_summary import summary
from kvfix.engine import Engine
from kvfix.errors import UnknownModelError

ROOT = Path(__file__).resolve().parents[1]
HANDBOOK = ROOT / "corpora" / "handbook"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("handbook_history", ROOT / "examples" / "handbook_history.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def repository(script, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("past") / "handbook"
    script.make(folder)
    return folder


def git(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_every_edit_applies_to_what_is_there(script):
    texts = {path.relative_to(HANDBOOK).as_posix(): path.read_text("utf-8") for path in HANDBOOK.rglob("*.md")}
    ids = Counter(edit["id"] for edit in script.edits())
    assert len(ids) == sum(ids.values()) >= 70
    for edit in script.edits():
        assert set(edit) <= {"id", "doc", "message", "replacements", "from", "branch"}
        assert not edit["message"].endswith(".")
        before = text = texts.pop(edit.get("from", edit["doc"]))
        for number, change in enumerate(edit["replacements"]):
            assert text.count(change["find"]) == 1, (edit["id"], number)
            text = text.replace(change["find"], change["replace"])
        assert text == script.applied(edit, before)
        assert text != before or "from" in edit
        texts[edit["doc"]] = text
    for doc, text in texts.items():
        assert text.endswith("\n")
        assert text.count("```") % 2 == 0, doc
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({row.count("|") for row in table.splitlines()}) == 1, table


def test_it_is_the_same_wherever_it_is_made(script, repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    script.make(tmp_path / "again")
    assert git(tmp_path / "again", "rev-parse", "HEAD") == git(repository, "rev-parse", "HEAD")


def test_a_folder_in_use_is_left_alone(script, tmp_path):
    (tmp_path / "mine.md").write_text("mine")
    with pytest.raises(SystemExit, match="not empty"):
        script.make(tmp_path)


def test_what_the_repository_holds(script, repository):
    assert git(repository, "status", "--porcelain") == []
    assert len(git(repository, "rev-list", "--merges", "HEAD")) == 1
    assert len(git(repository, "rev-list", "--no-merges", "HEAD")) == len(script.edits()) + 7
    edits = list((history := open_history(repository)).edits())
    assert len(edits) == len(script.edits()) - 1
    assert sum(edit.renamed for edit in edits) == sum("from" in edit for edit in script.edits()) - 1 == 2
    passed_over = {"binary": 1, "not UTF-8": 1, f"larger than {2**20} bytes": 1, "renamed only": 1, "added": 3}
    assert history.skipped == passed_over


@pytest.fixture(scope="module")
def demo_tokenizer(user_cache) -> Iterator[Engine]:
    """The demo model without its weights; skips where its file has not been fetched."""
    with user_cache():
        try:
            yield Engine.open(None)
        except UnknownModelError as error:
            pytest.skip(error.message)


def test_the_mix_is_that_of_real_edits(repository, demo_tokenizer):
    """In 1,070 real edits 11% keep their length, 49% have one span, 57% grow, and 62% change at most 32 tokens."""
    options = ReplayOptions(max_edits=200, max_tokens=8192, dry_run=True)
    replay = Replay(demo_tokenizer, open_history(repository), options)
    list(replay.records())
    body = summary(replay)
    edits = body["edits"]
    assert edits["num_edits"] >= 70
    for name, low, high in (
        ("length_preserving", 0.06, 0.14),
        ("one_span", 0.40, 0.60),
        ("grows", 0.50, 0.65),
        ("shrinks", 0.25, 0.40),
        ("few_tokens", 0.55, 0.70),
        ("small_share", 0.87, 0.97),
    ):
        assert low <= edits[name] <= high, (name, edits[name])
    assert 0.17 <= edits["edit_at"]["median"] <= 0.39
    assert 8 <= body["arms"][0]["all"]["suffix_per_row"]["median"] <= 14
