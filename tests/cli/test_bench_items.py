"""kvfix bench items: records and a summary for programs, tables for people, pictures, and going on after a break."""

import json
import sys

import pytest

from kvfix.bench.case import Case
from kvfix.bench.items import dump_items
from kvfix.engine import Engine
from tests.bench.made import draft, own_record, record, some, turned

SELECTORS = "editlocal,random,exact"


@pytest.fixture(scope="module")
def chosen(model):
    """Two items that the model keeps and one that it answers wrongly."""
    first, second, third = some(Engine.open(model, device="cpu", dtype="float32"), 3)
    return [first, turned(second), third]


@pytest.fixture
def study(kvfix, model, chosen, tmp_path):
    """Call the study on these items."""
    dump_items(tmp_path / "items.jsonl", chosen)

    def call(*arguments):
        given = ("--items", "items.jsonl", "--model", model, "--device", "cpu", "--dtype", "float32", *arguments)
        return kvfix("bench", "items", "--selectors", SELECTORS, "--k", "2,4", "--seeds", 2, *given)

    return call


def lines(result):
    return [json.loads(line, parse_constant=pytest.fail) for line in result.out.splitlines()]


def test_json_holds_a_record_a_line_and_then_the_summary(study, chosen):
    result = study("--json")
    assert result.code == 0
    *records, summary = lines(result)
    assert len(records) == 3 * 2 * 4
    assert {r["schema"] for r in records} == {"kvfix.item/1"}
    assert summary["schema"] == "kvfix.items/1"
    assert summary["items"][0]["num_kept"] == 2
    assert summary["items"][0]["dropped"] == {"fresh wrong": 1}
    assert {r["id"] for r in records if not r["kept"]} == {chosen[1].id}
    exact = [cell for cell in summary["cells"] if cell["selector"] == "exact"]
    assert [cell["mr_mean"] for cell in exact] == pytest.approx([1, 1], abs=1e-2)
    assert summary["checks"]["upstream_unchanged"] is True


def test_a_broken_study_goes_on(study, tmp_path):
    out = tmp_path / "folder" / "records.jsonl"
    whole = lines(study("--out", out, "--json"))
    content = out.read_bytes()
    out.write_bytes(content[: len(content) // 2])
    again = lines(study("--out", out, "--json"))
    assert len(again) == len(whole)
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["id"], r["selector"]) for r in kept if r["selector"] != "stale"] == [
        (r["id"], r["selector"]) for r in again[:-1]
    ]
    assert len(kept) == len(again) - 1 + 3
    assert again[-1]["items"] == whole[-1]["items"]
    assert lines(study("--out", out, "--json"))[:-1] == again[:-1]


def test_an_interrupted_study_keeps_what_it_has(study, tmp_path, monkeypatch):
    out = tmp_path / "records.jsonl"
    seen = []

    def interrupted(engine, item, before):
        seen.append(item.id)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return Case(engine, item, before)

    with monkeypatch.context() as patched:
        patched.setattr("kvfix.bench.study.Case", interrupted)
        assert study("--out", out).code == 130
    assert len(out.read_text().splitlines()) == 1 + 2 * 4
    assert len(lines(study("--out", out, "--json"))) == 3 * 2 * 4 + 1


def test_people_get_tables_and_pictures(study):
    result = study("--plots", "plots", "--transplant", 1)
    assert result.code == 0
    assert result.out == ""
    for part in ("direct", "2 of 3 items kept, 1 fresh wrong", "editlocal", "transplant:exact", "best", "95% interval"):
        assert part in result.err
    assert result.err.count("drew plots/") == 4


@pytest.mark.parametrize(
    ("flag", "said"),
    [(True, "unchanged by every repair"), (False, "CHANGED by a repair"), (None, "no repair to check")],
)
def test_whether_rows_before_the_edit_changed_is_said(kvfix, tmp_path, flag, said):
    records = [own_record("a"), record("a", "editlocal", upstream_unchanged=flag)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    shown = kvfix("bench", "items", "--report-only", "--out", "records.jsonl").err
    assert f"rows before the edit: {said}" in shown
    assert "1.0e-06 from fresh ones at most" in shown


def test_quietly(study):
    result = study("--quiet", "--limit", 1)
    assert (result.code, result.out, result.err) == (0, "", "")


def test_only_the_first_items(study):
    assert lines(study("--json", "--limit", 1))[-1]["items"][0]["num_items"] == 1


def test_a_report_needs_no_model(kvfix, tmp_path):
    out = tmp_path / "records.jsonl"
    records = [own_record("a"), record("a", "editlocal"), record("a", "exact", mr=1.0, select_ms=None)]
    out.write_text("".join(json.dumps(r) + "\n" for r in records) + '{"torn')
    result = kvfix("bench", "items", "--report-only", "--out", out, "--json")
    assert result.code == 0
    assert lines(result)[:-1] == records[1:], "a line a repair; the item's own is summed up"
    assert out.read_text().endswith('{"torn'), "a report writes nothing"
    assert "1 better, 0 tied, 0 worse, p 1.000" in kvfix("bench", "items", "--report-only", "--out", out).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the items with --items"),
        (("--items", "nowhere.jsonl"), "cannot read the items file"),
        (("--items", "items.jsonl", "--selectors", "nosuch"), "unknown selector 'nosuch'"),
        (("--items", "items.jsonl", "--k", "8,x"), "--k 8,x: expected whole numbers"),
        (("--report-only",), "--report-only needs --out"),
        (("--report-only", "--out", "items.jsonl"), "items.jsonl:1: not a record"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_model_is_loaded(kvfix, tmp_path, monkeypatch, arguments, message):
    dump_items(tmp_path / "items.jsonl", [draft(1)])
    monkeypatch.setattr(Engine, "open", lambda *given, **more: pytest.fail("opened a model"))
    result = kvfix("bench", "items", *arguments)
    assert result.code == 2
    assert message in result.err


def test_a_missing_library_is_named_before_a_model_is_loaded(kvfix, tmp_path, monkeypatch):
    dump_items(tmp_path / "items.jsonl", [draft(1)])
    monkeypatch.setattr(Engine, "open", lambda *given, **more: pytest.fail("opened a model"))
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = kvfix("bench", "items", "--items", "items.jsonl")
    assert result.code == 2
    assert "pip install 'kvfix[bench]'" in result.err
