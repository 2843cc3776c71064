"""Edits whose selector asks the model: what it looks at, with which question, and what a dry run says instead."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvfix import align
from kvfix.engine import Engine, StaleEvidence
from kvfix.errors import DocumentError, UsageError
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.edit import edit
from kvfix.pipeline.evidence import StoredEvidence
from kvfix.pipeline.plan import EditOptions
from kvfix.probes import GivenProbe
from kvfix.selectors import Budget, get_selector, make_plan
from tests.pipeline.desk import EDITS, TEXT, Desk, equal
from tests.selectors.contexts import Signals

INFORMED = ("attention", "deviation")
GIVEN = GivenProbe("Who signs?", "the clerk", "nobody", "a.md")
ELSEWHERE = GivenProbe("Who signs elsewhere?", "the clerk", "nobody", "b.md")


def scores_by_hand(desk: Desk, name: str, report, query: str) -> np.ndarray:
    """Evidence of the stored rows `[N]`, all gathered and turned at once, as a selector will be told."""
    engine, change = desk.engine, report.change
    rows = change.snapshot.rows.realigned(change.diff.stale_source())
    cache = align.allocate(change.snapshot.segments[0], rows, change.new.token_ids, 100, "cpu")
    align.gather(cache, rows, change.snapshot.segments)
    align.turn(cache, rows, engine.rotations)
    stored = partial(align.values_at, change.snapshot.rows, change.snapshot.segments)
    evidence = StaleEvidence(engine, cache, change.diff, stored)
    if name == "kindred":
        return evidence.kinship(3)
    asked = tuple(engine.text.question_ids(query))
    return evidence.query_attention(asked) if name == "attention" else evidence.deviation(1)


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("name", INFORMED)
def test_rows_are_those_of_the_highest_scores(desk, name, kind):
    desk.build(TEXT)
    desk.edit(TEXT.replace("desk 4", "desk 17"), strategy="repair", k=3, verify=False)
    before = desk.loaded()
    text = EDITS[kind]
    report = desk.edit(text, selector=name, k=5, strategy="repair", verify=False, query="Who signs?")
    diff = report.change.diff
    scores = scores_by_hand(desk, name, report, "Who signs?")
    pool = [row for row in range(diff.first, diff.num_new) if diff.source[row] >= 0]
    best = sorted(pool, key=lambda row: (-scores[row], row))[: 5 * len(diff.spans)]
    assert report.plan.positions.tolist() == sorted([*np.flatnonzero(diff.source < 0), *best])
    assert (report.outcome, report.plan.selector) == ("repaired", name)
    assert equal(desk.loaded(), before, diff.first)


@pytest.mark.parametrize("kind", EDITS)
def test_kindred_places_are_those_of_the_stored_values(desk, kind):
    desk.build(TEXT)
    desk.edit(TEXT.replace("desk 4", "desk 17"), strategy="repair", k=3, verify=False)
    report = desk.edit(EDITS[kind], selector="kindred", k=24, strategy="repair", verify=False, auto_probes=False)
    change = report.change
    scores = Signals(scores_by_hand(desk, "kindred", report, ""))
    expected = make_plan(get_selector("kindred"), replace(change.context(Budget(24)), evidence=scores))
    assert report.plan.positions.tolist() == expected.positions.tolist()
    assert (report.outcome, report.plan.selector) == ("repaired", "kindred")


class Seen(list):
    """The questions that rows were looked at with."""


@pytest.fixture
def seen(monkeypatch) -> Seen:
    asked = Seen()
    real = StoredEvidence.query_attention
    monkeypatch.setattr(StoredEvidence, "query_attention", lambda self, ids: asked.append(ids) or real(self, ids))
    return asked


class TestTheQuestion:
    @pytest.mark.parametrize(
        ("options", "asked"),
        [
            ({"query": "Who pays?", "probes": (GIVEN,)}, lambda text: text.question_ids("Who pays?")),
            ({"query": "\nWho pays?"}, lambda text: text.plain_ids("\nWho pays?")),
            ({"probes": (ELSEWHERE, GIVEN)}, lambda text: text.question_ids("Who signs?")),
            ({"probes": (GIVEN,), "auto_probes": False}, lambda text: text.question_ids("Who signs?")),
        ],
        ids=["given", "verbatim", "of a given probe", "of the only probe"],
    )
    def test_is(self, desk, seen, options, asked):
        desk.build(TEXT)
        desk.edit(EDITS["growing"], selector="attention", k=4, strategy="repair", verify=False, **options)
        assert seen == [tuple(asked(desk.engine.text))]

    def test_is_else_that_of_the_first_automatic_probe(self, desk, seen):
        desk.build(TEXT)
        report = desk.edit(EDITS["several spans"], selector="attention", k=4, strategy="repair", verify=False)
        [asked] = seen
        assert desk.engine.text.decode(list(asked)) == "\n\nAs stated above: Customers may return goods within "
        assert report.quality.probes[0].question.endswith("goods within")

    def test_is_missing(self, desk):
        desk.build(TEXT)
        with pytest.raises(UsageError, match="needs a question: give --query, or probes"):
            desk.edit(EDITS["growing"], selector="attention", k=4, probes=(ELSEWHERE,), auto_probes=False)
        assert desk.head().version == 1

    def test_is_too_long(self, desk):
        desk.build(TEXT)
        with pytest.raises(DocumentError, match="exceed the 512"):
            desk.edit(EDITS["growing"], selector="attention", k=4, query="Who? " * 200)
        assert desk.head().version == 1

    @pytest.mark.parametrize("query", ["", " \n"])
    def test_is_empty(self, query):
        with pytest.raises(UsageError, match="the question is empty"):
            EditOptions(query=query)


def test_only_who_asks_pays(desk, monkeypatch):
    monkeypatch.setattr("kvfix.engine.evidence.StaleEvidence.__init__", lambda *given: pytest.fail("rows were read"))
    monkeypatch.setattr("kvfix.pipeline.plan.question_of", lambda *given: pytest.fail("a question was made"))
    desk.build(TEXT)
    assert desk.edit(EDITS["growing"], selector="structure", k=4, verify=False).outcome == "repaired"
    report = desk.edit(TEXT, selector="attention", k=4, strategy="suffix", verify=False)
    assert report.outcome == "reprefilled"


def test_reading_rows_is_not_selecting(desk, monkeypatch):
    """The step that is under way while the rows are read."""
    clocks, steps = [], []
    real = Clock.__call__

    def noted(self, step):
        clocks.append(self)
        steps.append(step)
        return real(self, step)

    monkeypatch.setattr(Clock, "__call__", noted)
    desk.build(TEXT)
    steps.clear()
    report = desk.edit(EDITS["growing"], selector="deviation", k=4, strategy="repair", verify=False)
    at = steps.index("select")
    assert steps[at : at + 5] == ["select", "model", "load", "load", "align"]
    times = report.timing_ms()
    assert set(times) >= {"load", "align", "select"}
    assert "model" not in times
    assert times["total"] < sum(report.clock.ms.values())


class TestADryRun:
    @pytest.mark.parametrize("name", INFORMED)
    @pytest.mark.parametrize("kind", EDITS)
    def test_says_the_most_that_it_takes(self, desk, kind, name):
        desk.build(TEXT)
        options = {"selector": name, "k": 5, "strategy": "repair", "query": "Who signs?"}
        planned = desk.edit(EDITS[kind], dry_run=True, **options)
        assert planned.outcome == "planned"
        assert planned.reason == f"{name} chooses its rows with the model; this is the most that it takes"
        done = desk.edit(EDITS[kind], verify=False, **options)
        assert planned.tokens() == done.tokens()

    @pytest.mark.parametrize("name", INFORMED)
    def test_loads_no_weights(self, desk, zoo, name):
        desk.build(TEXT)
        engine = Engine.open(str(zoo("llama")), device="cpu", dtype="float32")
        document = desk.document(EDITS["growing"])
        options = EditOptions(selector=name, k=5, strategy="repair", dry_run=True)
        report = edit(engine, desk.store, desk.head(), document, options)
        assert report.plan.token_layers(1) == report.change.diff.num_span + 5
        assert "_loaded" not in engine.__dict__

    def test_is_overruled_by_the_cost_like_any_other(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], selector="attention", k=300, dry_run=True)
        assert report.plan.strategy == "suffix"
        assert "every row after the edit" in report.reason


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["causal", "carrier"])
def test_diagnostics_do_not_repair(desk, name, dry_run):
    desk.build(TEXT)
    with pytest.raises(UsageError, match="use `kvfix bench items`"):
        desk.edit(EDITS["growing"], selector=name, k=4, dry_run=dry_run)
    assert desk.head().version == 1


@pytest.mark.parametrize("name", INFORMED)
def test_rows_that_may_not_move_are_not_looked_at(desk_of, name):
    desk = desk_of("gpt2")
    desk.build(TEXT)
    report = desk.edit(EDITS["growing"], selector=name, k=4, verify=False)
    assert report.plan.strategy == "suffix"
    assert "do not simply turn" in report.reason
    again = desk.edit(EDITS["growing"].replace("box", "fox"), selector=name, k=4, strategy="repair", verify=False)
    assert again.outcome == "repaired"
