"""kvfix refresh: the documents with the most debt first, and nothing that is sync's business."""

import json

import pytest

from kvfix import EditOptions, KVFix
from kvfix.errors import UsageError
from kvfix.pipeline.refresh import RefreshOptions, measure


@pytest.fixture
def owing(place, model):
    """ferry.md is two edits behind, rules/deck.md one."""
    options = EditOptions(k=0, strategy="repair", verify=False)
    with KVFix.open(place.store, model, device="cpu") as kv:
        place.replace("ferry.md", "30 crowns", "45 crowns")
        kv.repair(place.ferry, options)
        place.replace("ferry.md", "noon", "nine")
        kv.repair(place.ferry, options)
        place.replace("rules/deck.md", "the bow", "the stern")
        kv.repair("rules/deck.md", options)
        assert measure(kv.record("ferry.md")) > measure(kv.record("rules/deck.md")) > 0
    return place


@pytest.fixture
def refresh(owing, at):
    def call(*arguments, code=0):
        result = at("refresh", *arguments, "--json")
        assert result.code == code, result.err
        *documents, summary = [json.loads(line) for line in result.out.splitlines()]
        assert all(line["schema"] == "kvfix.refresh/1" for line in [*documents, summary])
        return documents, summary

    return call


def outcomes(documents):
    return [(line["doc"], line["outcome"]) for line in documents]


def test_most_debt_first_until_there_is_none(refresh, at):
    documents, summary = refresh()
    assert outcomes(documents) == [("ferry.md", "reprefilled"), ("rules/deck.md", "reprefilled")]
    assert documents[0]["debt_before"]["edits_behind"] == 2
    assert documents[0]["debt"] == {"stale_rows": 0, "edits_behind": 0}
    assert documents[0]["version"] == 4
    assert documents[0]["timing_ms"]["total"] > 0
    assert (summary["totals"]["reprefilled"], summary["stale_rows"]) == (2, 0)
    assert {d["state"] for d in at("status", "--json").json["documents"]} == {"exact"}
    assert refresh()[0] == []
    assert at("verify", "--deep").code == 0


@pytest.mark.parametrize(("more", "why"), [(["--max", 1], "1 documents were asked"), (["--time-budget", "0"], "0 s")])
def test_limits_leave_the_rest(refresh, more, why):
    documents, summary = refresh(*more)
    assert outcomes(documents) == [("ferry.md", "reprefilled"), ("rules/deck.md", "left")]
    assert why in documents[1]["reason"]
    assert summary["totals"]["left"] == 1
    assert summary["stale_rows"] == documents[1]["debt"]["stale_rows"] > 0
    assert outcomes(refresh(*more)[0]) == [("rules/deck.md", "reprefilled")]


def test_little_debt_is_left_alone(refresh, owing):
    rows = refresh("--dry-run")[0][1]["debt"]["stale_rows"]
    first = refresh("--dry-run")[0][0]["debt"]["stale_rows"]
    least, most = sorted([rows, first])
    documents, _ = refresh("--dry-run", "--min-debt", most)
    assert len(documents) == (1 if least < most else 2)
    assert outcomes(refresh("--min-debt", most + 1)[0]) == []


def test_what_is_syncs_business_is_passed_over(refresh, owing):
    owing.replace("ferry.md", "45 crowns", "60 crowns")
    (owing.corpus / "rules" / "deck.md").unlink()
    documents, _ = refresh("--max", 1)
    assert outcomes(documents) == [("ferry.md", "skipped"), ("rules/deck.md", "skipped")]
    assert "has changed; run kvfix sync" in documents[0]["reason"]
    assert "is gone; run kvfix sync" in documents[1]["reason"]


def test_an_unreadable_one_counts(refresh, owing):
    owing.ferry.write_bytes(b"caf\xe9 \xff")
    documents, _ = refresh(code=3)
    assert outcomes(documents) == [("ferry.md", "skipped"), ("rules/deck.md", "reprefilled")]
    assert "not UTF-8" in documents[0]["reason"]


def test_below_a_path_and_for_people(owing, at):
    result = at("refresh", owing.corpus / "rules")
    assert (result.code, result.out) == (0, "")
    assert "rules/deck.md" in result.err
    assert "ferry.md" not in result.err
    assert at("refresh", "--quiet").err == ""
    assert "no document has debt" in at("refresh").err


def test_a_dry_run_computes_nothing(owing, kvfix):
    result = kvfix("refresh", "--store", owing.store, "--model", "/no/such/model", "--dry-run")
    assert result.code == 0
    assert "2 planned" in result.err


def test_another_model_is_refused(owing, kvfix, zoo):
    result = kvfix("refresh", "--store", owing.store, "--model", zoo("qwen2"), "--json")
    assert (result.code, result.json["error"]["code"]) == (5, "model_mismatch")


@pytest.mark.parametrize("wrong", [{"min_debt": 0}, {"max_documents": 0}])
def test_options_that_make_no_sense(wrong):
    with pytest.raises(UsageError):
        RefreshOptions(**wrong)
