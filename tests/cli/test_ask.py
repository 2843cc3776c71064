"""kvfix ask and status: answers on standard output, states, refusals."""

import pytest
from rich.cells import cell_len


def test_the_answer_alone_is_on_standard_output(place, at):
    result = at("ask", "What is the fare?", "--doc", place.ferry, "--max-new", "5")
    assert result.code == 0
    assert result.out.endswith("\n")
    assert "exact" not in result.out
    assert "version 1, exact" in result.err
    quiet = at("ask", "What is the fare?", "--doc", place.ferry, "--max-new", "5", "--quiet")
    assert (quiet.out, quiet.err) == (result.out, "")


def test_json(place, at):
    body = at("ask", "What is the fare?", "--doc", "ferry.md", "--max-new", "5", "--json").json
    assert (body["schema"], body["doc"], body["question"]) == ("kvfix.ask/1", "ferry.md", "What is the fare?")
    assert set(body["model"]) == {"name", "fingerprint", "dtype", "device"}
    [answer] = body["answers"]
    assert (answer["source"], answer["version"], answer["state"]) == ("current", 1, "exact")
    assert answer["load_ms"] == round(answer["load_ms"], 3)


def test_compare(place, at):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    assert at("edit", "ferry.md", "--strategy", "repair", "--no-verify", "--quiet").code == 0
    body = at("ask", "The fare?", "--doc", "ferry.md", "--compare", "--max-new", "3", "--json").json
    assert [(a["source"], a["version"], a["state"]) for a in body["answers"]] == [
        ("previous", 1, "exact"),
        ("current", 2, "repaired"),
        ("fresh", None, "exact"),
    ]
    shown = at("ask", "The fare?", "--doc", "ferry.md", "--compare", "--max-new", "3").out
    assert [line.split()[0] for line in shown.splitlines() if "answered in" in line] == ["previous", "current", "fresh"]


def test_a_changed_file_is_refused(place, at):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    result = at("ask", "The fare?", "--doc", "ferry.md", "--json")
    assert result.code == 2
    assert f"kvfix edit {place.ferry}" in result.json["error"]["message"]
    result = at("ask", "The fare?", "--doc", "ferry.md", "--stale-ok", "--max-new", "3")
    assert result.code == 0
    assert "warning: the file has changed" in result.err


def test_a_missing_file_is_refused(place, at):
    place.ferry.unlink()
    assert at("ask", "The fare?", "--doc", place.ferry).code == 2
    assert at("ask", "The fare?", "--doc", place.ferry, "--stale-ok", "--max-new", "3", "--compare").code == 0


@pytest.mark.parametrize(("question", "doc"), [(" ", "ferry.md"), ("Why?", "empty.md"), ("Why?", "none.md")])
def test_nothing_to_answer_from(place, at, question, doc):
    assert at("ask", question, "--doc", doc, "--json").json["error"]["exit_code"] == 2


def test_status_json(place, at):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    (place.corpus / "rules" / "deck.md").unlink()
    body = at("status", "--json").json
    assert body["schema"] == "kvfix.status/1"
    assert {d["doc"]: d["state"] for d in body["documents"]} == {
        "empty.md": "exact",
        "ferry.md": "stale",
        "rules/deck.md": "missing",
    }
    names = ["doc", "num_tokens", "state", "version", "stale_rows", "edits_behind", "last_mr", "cache_bytes"]
    assert all(name in document for document in body["documents"] for name in names)
    assert body["totals"]["documents"] == 3


def test_status_below_a_path(place, at):
    assert [d["doc"] for d in at("status", place.corpus / "rules", "--json").json["documents"]] == ["rules/deck.md"]
    assert len(at("status", place.ferry, "--json").json["documents"]) == 1


def test_status_for_people(place, at):
    result = at("status")
    assert (result.code, result.out) == (0, "")
    assert str(place.corpus) in result.err
    assert "3 documents: 3 exact" in result.err
    assert "\x1b" not in result.err
    quiet = at("status", "--quiet")
    assert (quiet.out, quiet.err) == ("", "")


def test_a_narrow_table_folds_names_and_keeps_the_figures(place, at, monkeypatch):
    name = "a page with a rather long name, twice as long as there is room for, 漢字漢字.md"
    place.write(name, "A page.")
    place.replace("ferry.md", "30 crowns", "45 crowns")
    at("build", place.corpus / name)
    monkeypatch.setenv("COLUMNS", "80")
    header, *shown = at("status").err.splitlines()[1:]
    assert header.split() == ["document", "tokens", "state", "stale", "rows", "edits", "MR", "stored"]
    assert max(map(cell_len, shown)) <= 80
    first = next(number for number, line in enumerate(shown) if line.startswith("a page"))
    last = next(number for number, line in enumerate(shown) if line.startswith("empty.md"))
    room = cell_len(shown[first].split("  ")[0])
    assert last - first > 1
    assert shown[first][:room] + "".join(shown[first + 1 : last]) == name
    assert shown[first].split()[-7:-2] == ["7", "exact", "-", "-", "-"]
    assert [line.split()[2] for line in shown if line.startswith("ferry.md")] == ["stale"]
