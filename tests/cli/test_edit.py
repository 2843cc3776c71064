"""kvfix edit and diff: reports, plans, texts from elsewhere."""

import io
import json

import pytest

from kvfix.cost import adaptive_k


@pytest.fixture
def changed(place):
    return place.replace("ferry.md", "30 crowns", "45 crowns")


TOP = ["schema", "doc", "outcome", "model", "selector", "k", "length_preserving", "spans", "tokens", "quality"]
TOP += ["timing_ms", "speedup", "bytes", "version", "debt"]


def test_an_adaptive_k_is_told_in_rows(changed, at):
    body = at("edit", changed, "--k", "adaptive", "--strategy", "repair", "--json").json
    assert (body["k"], body["outcome"]) == (
        adaptive_k(body["tokens"]["new"] - body["spans"][0]["new"][0], 1),
        "repaired",
    )
    refused = at("edit", changed, "--k", "many")
    assert (refused.code, "neither a whole number nor 'adaptive'" in refused.err) == (2, True)


def test_json(changed, at):
    result = at("edit", changed, "--k", "8", "--strategy", "repair", "--json")
    assert (result.code, result.err) == (0, "")
    body = result.json
    assert [name for name in TOP if name not in body] == []
    assert (body["schema"], body["doc"], body["outcome"], body["version"]) == (
        "kvfix.edit/1",
        "ferry.md",
        "repaired",
        2,
    )
    assert (body["selector"], body["k"], body["length_preserving"]) == ("linked", 8, True)
    [span] = body["spans"]
    assert (span["old_text"], span["new_text"]) == ("30", "45")
    assert body["tokens"]["recomputed"] == body["tokens"]["span"] + 8
    assert body["tokens"]["token_layers"] == 3 * body["tokens"]["recomputed"]
    assert body["quality"]["num_probes"] == 1
    assert body["timing_ms"]["suffix_prefill"] is None
    assert body["bytes"]["written_bytes"] > body["bytes"]["changed_bytes"] > 0
    assert body["debt"]["edits_behind"] == 1
    assert at("status", "--json").json["totals"]["repaired"] == 1


def test_people_see_a_report_on_stderr(changed, at):
    result = at("edit", changed, "--strategy", "repair", "--measure")
    assert (result.code, result.out) == (0, "")
    assert "[-30-]{+45+}" in result.err
    for word in ("repaired", "version 1 → 2", "probe", "against a full prefill", "end to end", "written", "debt"):
        assert word in result.err


def test_quiet(changed, at):
    result = at("edit", changed, "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_unchanged(place, at):
    body = at("edit", "ferry.md", "--json").json
    assert (body["outcome"], body["version"]) == ("unchanged", 1)
    assert body["reason"]
    assert "unchanged" in at("edit", "ferry.md").err


def test_dry_run_plans_and_writes_nothing(changed, at):
    body = at("edit", changed, "--dry-run", "--strategy", "repair", "--json").json
    assert (body["outcome"], body["version"]) == ("planned", 1)
    assert body["cost"]["repair"] < body["cost"]["suffix"] < body["cost"]["full"]
    assert at("status", "--json").json["totals"]["stale"] == 1
    assert "planned" in at("edit", changed, "--dry-run").err


@pytest.mark.parametrize(("strategy", "recomputed"), [("full", "full"), ("suffix", "suffix")])
def test_strategies(changed, at, strategy, recomputed):
    body = at("edit", changed, "--strategy", strategy, "--no-verify", "--json").json
    assert (body["outcome"], body["strategy"]) == ("reprefilled", strategy)
    assert body["tokens"]["recomputed"] == body["cost"][recomputed]
    assert body["debt"]["stale_rows"] == 0
    assert body["speedup"]["compute_vs_full"] is None


def test_text_from_a_file(place, at, tmp_path):
    new = tmp_path / "new.txt"
    new.write_text(place.ferry.read_text().replace("noon", "dawn"))
    body = at("edit", "ferry.md", "--text", new, "--no-verify", "--json").json
    [span] = body["spans"]
    assert "noo" in span["old_text"]
    assert "daw" in span["new_text"]
    assert at("status", "--json").json["totals"]["stale"] == 1


def test_text_from_standard_input(place, at, monkeypatch):
    text = place.ferry.read_text() + "No dogs."
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + text.encode())))
    body = at("diff", "ferry.md", "--text", "-", "--json").json
    assert [span["new_text"] for span in body["spans"]] == ["No dogs."]


@pytest.mark.parametrize(("content", "why"), [(b"caf\xe9", "not UTF-8 at byte 3"), (b"a\0b", "NUL byte at byte 1")])
def test_a_text_that_is_none(at, tmp_path, content, why):
    (tmp_path / "bad.txt").write_bytes(content)
    result = at("edit", "ferry.md", "--text", tmp_path / "bad.txt", "--json")
    assert result.code == 3
    assert why in result.json["error"]["message"]


def test_a_document_that_has_grown_too_long(place, at):
    place.write("ferry.md", "a word " * 400)
    result = at("edit", "ferry.md", "--json")
    assert result.code == 3
    assert result.json["error"]["code"] == "document"
    assert "2048" in result.json["error"]["message"]


def test_probes(changed, at, tmp_path):
    file = tmp_path / "probes.jsonl"
    file.write_text(json.dumps({"question": "What is the fare?", "old": "30 crowns", "new": "45 crowns"}))
    body = at("edit", changed, "--probes", file, "--json").json
    assert {probe["kind"] for probe in body["quality"]["probes"]} == {"auto", "given"}
    file.write_text("{")
    result = at("edit", changed, "--probes", file)
    assert result.code == 2
    assert f"{file}:1" in result.err


def test_probes_beside_the_corpus_are_found(changed, place, at):
    place.write("probes.jsonl", json.dumps({"question": "The fare?", "old": "30", "new": "45", "doc": "ferry.md"}))
    assert "given" in {probe["kind"] for probe in at("edit", changed, "--json").json["quality"]["probes"]}


def test_low_quality(changed, at):
    result = at("edit", changed, "--min-mr", "1e9", "--on-low", "fail", "--json")
    assert result.code == 7
    assert result.json["error"]["code"] == "low_quality"
    assert at("status", "--json").json["totals"]["stale"] == 1
    body = at("edit", changed, "--min-mr", "1e9", "--json").json
    assert body["outcome"] == "reprefilled"


def test_diff_json(changed, at):
    body = at("diff", changed, "--json").json
    assert body["schema"] == "kvfix.diff/1"
    assert body["tokens"] == {"old": body["tokens"]["old"], "new": body["tokens"]["old"], "span": 2}
    assert (body["doc"], body["length_preserving"], body["strategy"]) == ("ferry.md", True, "repair")
    assert set(body["cost"]) == {"repair", "suffix", "full"}
    assert body["reason"] is None


def test_diff_for_people(changed, at):
    result = at("diff", changed)
    assert (result.code, result.out) == (0, "")
    assert "fare is [-30-]{+45+} crowns" in result.err
    assert "a full prefill" in result.err


def test_diff_of_an_unchanged_document(place, at):
    body = at("diff", "ferry.md", "--json").json
    assert (body["outcome"], body["spans"], body["tokens"]) == ("unchanged", [], None)
    assert "unchanged" in at("diff", "ferry.md").err


def test_diff_loads_no_weights(changed, at, monkeypatch):
    monkeypatch.setattr("kvfix.engine.load.load_model", lambda *given: pytest.fail("weights were loaded"))
    assert at("diff", changed, "--json").code == 0
    assert at("edit", changed, "--dry-run", "--json").code == 0


def test_a_question_reaches_the_selector(changed, at):
    body = at("edit", changed, "--selector", "attention", "--query", "What is the fare?", "--k", "6", "--json").json
    assert (body["outcome"], body["selector"]) == ("repaired", "attention")
    assert body["tokens"]["recomputed"] == body["tokens"]["span"] + 6
    assert at("edit", changed, "--selector", "attention", "--query", " ").code == 2


def test_diff_says_the_most_that_a_selector_takes(changed, at, monkeypatch):
    monkeypatch.setattr("kvfix.engine.load.load_model", lambda *given: pytest.fail("weights were loaded"))
    body = at("diff", changed, "--selector", "deviation", "--k", "6", "--json").json
    assert body["cost"]["repair"] == body["tokens"]["span"] + 6
    assert body["reason"] == "deviation chooses its rows with the model; this is the most that it takes"
    assert "the most that it takes" in at("diff", changed, "--selector", "deviation", "--k", "6").err


def test_a_diagnostic_is_sent_to_the_benchmark(changed, at):
    result = at("edit", changed, "--selector", "causal")
    assert result.code == 2
    assert "kvfix bench items" in result.err


def test_what_a_terminal_would_act_on_is_not_printed(place, at):
    place.replace("ferry.md", "30 crowns", "\x1b[31m30 crowns")
    result = at("diff", "ferry.md")
    assert "\x1b" not in result.err
    assert "\\u001b[31m" in result.err
