"""kvfix build: outcomes, skipped documents, dry runs."""

import pytest

from tests.cli.conftest import TEXTS


def outcomes(body):
    return {line["doc"]: line["outcome"] for line in body["documents"]}


def test_json(place, at):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    place.write("new.md", "A new page.")
    body = at("build", place.corpus, "--json").json
    assert body["schema"] == "kvfix.build/1"
    assert outcomes(body) == {
        "ferry.md": "built",
        "new.md": "built",
        "rules/deck.md": "unchanged",
        "empty.md": "unchanged",
    }
    by_doc = {line["doc"]: line for line in body["documents"]}
    new = by_doc["new.md"]
    assert new["corpus"] == str(place.corpus)
    assert (new["num_tokens"], new["version"], new["reason"]) == (11, 1, None)
    assert new["stored_bytes"] > new["cache_bytes"] > 0
    assert new["timing_ms"]["prefill"] == round(new["timing_ms"]["prefill"], 3)
    assert by_doc["ferry.md"]["version"] == 2
    totals = body["totals"]
    assert (totals["documents"], totals["built"], totals["unchanged"], totals["skipped"]) == (4, 2, 2, 0)
    assert totals["num_tokens"] == sum(line["num_tokens"] for line in body["documents"])


def test_the_rest_is_done_when_some_cannot_be_read(place, at):
    place.write("cp1252.md", "caf\xe9".encode("cp1252"))
    place.write("long.md", "a word " * 400)
    place.write("new.md", "A new page.")
    result = at("build", place.corpus, "--json")
    assert result.code == 3
    by_doc = {line["doc"]: line for line in result.json["documents"]}
    assert by_doc["new.md"]["outcome"] == "built"
    assert "not UTF-8 at byte 3" in by_doc["cp1252.md"]["reason"]
    assert "2048" in by_doc["long.md"]["reason"]
    assert by_doc["long.md"]["num_tokens"] is None


def test_skipped_documents_are_named_even_quietly(place, at):
    place.write("cp1252.md", "caf\xe9".encode("cp1252"))
    result = at("build", place.corpus, "--quiet")
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("skipped  cp1252.md: not UTF-8 at byte 3")
    assert result.err.count("\n") == 1


def test_people_see_a_line_a_document_and_a_summary(place, at):
    place.write("new.md", "A new page.")
    result = at("build", place.corpus)
    assert (result.code, result.out) == (0, "")
    lines = result.err.splitlines()
    assert lines[0].startswith("built")
    assert lines[0].endswith("new.md")
    assert lines[-1].startswith("1 built, 3 unchanged: 11 tokens in ")


def test_dry_run_lists_and_writes_nothing(place, at):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    place.write("new.md", "A new page.")
    body = at("build", place.corpus, "--dry-run", "--json").json
    assert {d: o for d, o in outcomes(body).items() if o == "planned"} == {"ferry.md": "planned", "new.md": "planned"}
    assert {line["doc"]: line["reason"] for line in body["documents"]}["ferry.md"] == "changed"
    assert "ferry.md" in at("build", place.corpus, "--dry-run").err
    assert len(at("status", "--json").json["documents"]) == len(TEXTS)


def test_a_dry_run_makes_no_store(place, kvfix, tmp_path, model):
    result = kvfix("build", place.corpus, "--store", tmp_path / "none", "--model", model, "--dry-run", "--json")
    assert result.code == 0
    assert result.json["totals"]["planned"] == len(TEXTS)
    assert not (tmp_path / "none").exists()


def test_force_and_patterns(place, at):
    body = at("build", place.corpus, "--force", "--exclude", "rules/*", "--exclude", "empty.md", "--json").json
    assert outcomes(body) == {"ferry.md": "built"}


def test_a_single_file_belongs_to_its_known_corpus(place, at):
    place.write("rules/new.md", "A new page.")
    body = at("build", place.corpus / "rules" / "new.md", "--json").json
    assert [(line["doc"], line["corpus"]) for line in body["documents"]] == [("rules/new.md", str(place.corpus))]


@pytest.mark.parametrize("paths", [["nowhere"], ["none.md"]])
def test_paths_are_looked_at_before_the_model(kvfix, tmp_path, paths):
    result = kvfix("build", *paths, "--store", "s", "--model", "no/such/model", "--json")
    assert result.code == 2
    assert "no such file or directory" in result.json["error"]["message"]
    assert not (tmp_path / "s").exists()
