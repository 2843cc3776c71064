"""--log-format json: one object a line on standard error, and nothing else there."""

import json
from datetime import datetime, timezone

import pytest


@pytest.fixture
def logged(at):
    """`logged(…)` is the exit code, standard output, and the lines of the log."""

    def call(*arguments):
        before = datetime.now(timezone.utc)
        result = at(*arguments)
        lines = [json.loads(line, parse_constant=pytest.fail) for line in result.err.splitlines()]
        for line in lines:
            assert list(line)[:3] == ["time", "level", "event"]
            assert line["level"] in ("info", "warning", "error")
            assert abs((datetime.fromisoformat(line["time"]) - before).total_seconds()) < 120
        return result.code, result.out, lines

    return call


def named(lines, event):
    return [line for line in lines if line["event"] == event]


def test_a_sync_logs_what_changes_what_fails_and_what_it_comes_to(place, logged):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    place.write("a line\nbreak.md", "A new page.")
    place.write("bad.md", b"caf\xe9")
    code, out, lines = logged("sync", place.corpus, "--strategy", "repair", "--log-format", "json")
    assert (code, out) == (3, "")
    assert [lines[0]["event"], lines[-1]["event"]] == ["begin", "end"]
    assert (lines[0]["verb"], lines[0]["paths"]) == ("sync", [str(place.corpus)])
    documents = {line["doc"]: line for line in named(lines, "document")}
    assert {doc: (line["level"], line["outcome"]) for doc, line in documents.items()} == {
        "ferry.md": ("info", documents["ferry.md"]["outcome"]),
        "a line\nbreak.md": ("info", "built"),
        "bad.md": ("error", "skipped"),
    }
    assert "not UTF-8 at byte 3" in documents["bad.md"]["reason"]
    assert documents["ferry.md"]["outcome"] in ("repaired", "reprefilled")
    assert documents["ferry.md"]["version"] == 2
    assert documents["ferry.md"]["timing_ms"]["recompute"] > 0
    assert lines[-1]["totals"]["built"] == 1
    assert lines[-1]["timing_ms"]["total"] > 0


def test_quiet_leaves_warnings_and_errors(place, logged):
    arguments = ["sync", place.corpus, "--log-format", "json", "--quiet"]
    assert logged(*arguments) == (0, "", [])
    place.write("new.md", "A new page.")
    place.write("bad.md", b"caf\xe9")
    code, _, lines = logged(*arguments, "--hook", "/no/such/command")
    assert code == 3
    assert [(line["level"], line["event"]) for line in lines] == [("error", "document"), ("warning", "warning")]
    assert "hook" in lines[1]["message"]


def test_beside_json_on_standard_output(place, logged):
    place.write("new.md", "A new page.")
    _, out, lines = logged("sync", place.corpus, "--log-format", "json", "--json")
    assert json.loads(out.splitlines()[-1])["totals"]["built"] == 1
    assert [line["event"] for line in lines] == ["begin", "document", "end"]


def test_a_build_and_a_refresh_log_too(place, logged, at):
    place.write("new.md", "A new page.")
    _, _, lines = logged("build", place.corpus, "--log-format", "json")
    assert [line["event"] for line in lines] == ["begin", "document", "end"]
    assert (lines[1]["doc"], lines[1]["outcome"], lines[2]["totals"]["built"]) == ("new.md", "built", 1)
    place.replace("ferry.md", "30 crowns", "45 crowns")
    at("edit", place.ferry, "--k", 0, "--no-verify", "--strategy", "repair")
    _, _, lines = logged("refresh", "--log-format", "json")
    assert [line["event"] for line in lines] == ["begin", "refreshed", "end"]
    assert (lines[1]["doc"], lines[1]["outcome"], lines[2]["stale_rows"]) == ("ferry.md", "reprefilled", 0)


@pytest.mark.parametrize("given", [["--log-format", "json"], ["--log-format=json"]], ids="".join)
def test_failures_are_lines_too(logged, given):
    code, _, (line,) = logged("sync", "nowhere", "--no-such-option", *given)
    assert code == line["exit_code"] == 2
    assert (line["level"], line["event"], line["code"]) == ("error", "error", "usage")
    assert "no-such-option" in line["message"]


def test_the_format_may_stand_in_the_file_or_the_environment(place, logged, at, monkeypatch):
    (place.corpus / "kvfix.toml").write_text('log_format = "json"\n')
    place.write("new.md", "A new page.")
    assert [line["event"] for line in logged("sync", place.corpus)[2]] == ["begin", "document", "end"]
    # tables are for people in any case
    assert "4 documents" in at("status", place.corpus).err
    monkeypatch.setenv("KVFIX_LOG_FORMAT", "text")
    assert at("sync", place.corpus).err.startswith("4 unchanged")
    assert at("sync", place.corpus, "--log-format", "xml").code == 2
