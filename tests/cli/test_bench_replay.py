"""kvfix bench replay: records and a summary as JSON lines, tables for people, refusals by name."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.bench.test_history import Repo
from tests.cli.conftest import FERRY

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Repo:
    repo = Repo(tmp_path_factory.mktemp("replayed"))
    repo.commit({"ferry.md": FERRY, "logo.md": b"\0\1"})
    repo.commit({"ferry.md": FERRY.replace("30", "45"), "logo.md": b"\0\2"})
    repo.commit({"ferry.md": FERRY.replace("30", "45").replace("at noon", "at one in the afternoon")})
    return repo


def lines(out: str) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]


def test_json_lines_and_going_on(kvfix, repo, model, tmp_path):
    given = ("bench", "replay", "--git", repo.folder, "--model", model, "--out", tmp_path / "r.jsonl", "--json")
    first = kvfix(*given, "--max", 1, "--k", "8,adaptive")
    assert (first.code, first.err) == (0, "")
    *records, summary = lines(first.out)
    assert [(r["kind"], r["k"]) for r in records] == [("edit", 8), ("edit", "adaptive")]
    assert summary["kind"] == "summary"
    assert {body["schema"] for body in (*records, summary)} == {"kvfix.replay/1"}
    *more, summary = lines(kvfix(*given, "--k", "8,adaptive").out)
    assert (len(more), summary["edits"]["num_edits"]) == (2, 2)
    assert len(lines((tmp_path / "r.jsonl").read_text())) == 4


def test_tables(kvfix, repo, model):
    result = kvfix("bench", "replay", "--git", repo.folder, "--model", model)
    assert (result.code, result.out) == (0, "")
    for part in ("2 past edits, 3 of 3 commits read", "50% keep it, 50% grow", "linked", "KL neutral", "1 binary"):
        assert part in result.err


def test_a_dry_run(kvfix, repo, model):
    result = kvfix("bench", "replay", "--git", repo.folder, "--model", model, "--dry-run", "--k", "adaptive")
    assert result.code == 0
    assert "suffix/rows" in result.err
    assert "KL" not in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--git": "nowhere"}, "no such directory"),
        ({"--k": "many"}, "expected whole numbers or adaptive"),
        ({"--selectors": "best"}, "unknown selector"),
        ({"--time-budget": "soon"}, "expected a time"),
    ],
)
def test_refusals(kvfix, repo, model, options, message):
    given = {"--git": repo.folder, "--model": model, **options}
    result = kvfix("bench", "replay", *(part for pair in given.items() for part in pair))
    assert result.code == 2
    assert message in result.err


def test_help(kvfix):
    result = kvfix("bench", "replay", "--help")
    assert result.code == 0
    assert "Example: kvfix bench replay" in result.out
    assert "[default: " in result.out
