"""Edit: every kind of edit, what is stored and reported, and that nothing is lost when it fails."""

import json
import math

import numpy as np
import pytest
import torch

from kvfix.engine import Engine
from kvfix.engine.gate import deviation
from kvfix.errors import DocumentError, ModelMismatchError, NonFiniteError, StoreBusyError, UsageError
from kvfix.pipeline import repair
from kvfix.pipeline.edit import edit
from kvfix.pipeline.plan import EditOptions
from kvfix.pipeline.stream import streamed
from tests.pipeline.desk import EDITS, TEXT, equal, spied
from tests.tolerances import CACHE

SAME = EDITS["same length"]


def test_adaptive_rows_a_span(desk, monkeypatch):
    """15 hundredths of the rows behind the edit, a third of them for each of three spans."""
    monkeypatch.setattr("kvfix.cost.ADAPTIVE_LEAST", 3)
    desk.build(TEXT)
    report = desk.edit(EDITS["several spans"], k="adaptive", verify=False)
    diff = report.change.diff
    assert len(diff.spans) == 3
    assert report.plan.k == math.ceil(0.15 * (diff.num_new - diff.first) / 3) > 3
    assert len(report.plan.positions) == 3 * report.plan.k + diff.num_span
    assert desk.edit(EDITS["several spans"], k="adaptive").to_json()["k"] is None  # unchanged: no plan
    with pytest.raises(UsageError, match="k is a number of rows or adaptive, not 'all'"):
        EditOptions(k="all")


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("strategy", ["full", "suffix"])
def test_every_row_recomputed_equals_a_fresh_prefill(desk, kind, strategy):
    desk.build(TEXT)
    report = desk.edit(EDITS[kind], strategy=strategy, verify=False)
    assert report.outcome == "reprefilled"
    assert report.reason == f"strategy {strategy} was asked for"
    assert desk.head().debt.state == "exact"
    assert desk.store.snapshot(desk.head()).text == EDITS[kind]
    assert deviation(desk.loaded(), desk.fresh(EDITS[kind])) <= CACHE


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "cohere2", "smollm3"])
def test_repair(desk_of, kind, name):
    """Rows before the edit stay bit for bit, recomputed rows are what the operator gives, the debt says the rest."""
    desk = desk_of(name)
    desk.build(TEXT)
    before = desk.loaded()
    report = desk.edit(EDITS[kind], strategy="repair", k=6, verify=False)
    assert (report.outcome, report.reason) == ("repaired", None)
    diff, loaded, record = report.change.diff, desk.loaded(), desk.head()
    assert len(report.plan.positions) <= diff.num_span + 6 * len(diff.spans)
    assert equal(loaded, before, diff.first)
    assert np.array_equal(loaded.token_ids, desk.engine.encode(EDITS[kind]).token_ids)
    assert record.debt.stale_rows < diff.num_new or diff.first == 0
    exact = slice(0, record.debt.exact_until)
    assert record.debt.exact_until == 0 or deviation(loaded, desk.fresh(EDITS[kind]), exact) <= CACHE


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "cohere2"])
def test_a_budget_for_everything_is_exact(desk_of, kind, name):
    desk = desk_of(name)
    desk.build(TEXT)
    desk.edit(EDITS[kind], strategy="repair", k=10_000, verify=False)
    assert desk.head().debt.state == "exact"
    assert deviation(desk.loaded(), desk.fresh(EDITS[kind])) <= CACHE


@pytest.mark.parametrize("kind", EDITS)
def test_reports_are_json_and_complete(desk, kind):
    desk.build(TEXT)
    report = json.loads(json.dumps(desk.edit(EDITS[kind], k=4).to_json(), allow_nan=False))
    assert report["schema"] == "kvfix.edit/1"
    assert report["outcome"] in ("repaired", "reprefilled")
    assert (report["reason"] is None) == (report["outcome"] == "repaired")
    assert report["version"] == desk.head().version == 2
    tokens = report["tokens"]
    assert (tokens["old"], tokens["new"]) == (len(TEXT_IDS(desk, TEXT)), len(TEXT_IDS(desk, EDITS[kind])))
    assert tokens["token_layers"] == 3 * tokens["recomputed"]
    assert report["bytes"]["changed_bytes"] == tokens["recomputed"] * desk.head().row_bytes
    assert report["debt"]["stale_rows"] == desk.head().debt.stale_rows
    assert report["timing_ms"]["total"] == pytest.approx(
        sum(report["timing_ms"][step] for step in ("load", "diff", "align", "select", "recompute", "persist"))
    )
    assert report["timing_ms"]["full_prefill"] > 0
    assert report["timing_ms"]["suffix_prefill"] is None
    ms, speedup = report["timing_ms"], report["speedup"]
    if tokens["recomputed"]:
        assert speedup["compute_vs_full"] == pytest.approx(
            ms["full_prefill"] / (ms["align"] + ms["select"] + ms["recompute"])
        )
        assert speedup["end_to_end_vs_full"] == pytest.approx((ms["full_prefill"] + ms["full_persist"]) / ms["total"])
    assert speedup["compute_vs_suffix"] is None
    for span in report["spans"]:
        assert "".join(span["old_text"].split()) in "".join(TEXT.split())


def TEXT_IDS(desk, text):  # noqa: N802
    return desk.engine.text.encode(text).offsets


class TestSpans:
    """What a report says of the edit itself."""

    def test_same_length(self, desk):
        desk.build(TEXT)
        report = desk.edit(SAME).to_json()
        (span,) = report["spans"]
        assert report["length_preserving"] is True
        assert TEXT[: TEXT.index("30")].isascii()
        assert (span["old_text"], span["new_text"]) == ("30", "45")

    def test_several(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["several spans"]).to_json()
        assert report["length_preserving"] is False
        assert len(report["spans"]) == 3
        assert [span["old"][0] for span in report["spans"]] == sorted(span["old"][0] for span in report["spans"])

    def test_a_prefix_is_not_counted(self, zoo, desk_of):
        engine = Engine.open(str(zoo("llama")), template="Read this: {document}\n{question}")
        desk = desk_of(engine)
        desk.build(TEXT)
        num_prefix = desk.head().num_prefix
        assert num_prefix > 5
        report = desk.edit(EDITS["first token"]).to_json()
        assert report["spans"][0]["new"] == [0, 1]
        assert report["tokens"]["old"] == report["tokens"]["new"] == desk.head().num_tokens - num_prefix
        assert deviation(desk.loaded(), desk.fresh(EDITS["first token"]), slice(0, num_prefix + 1)) <= CACHE


class TestUnchanged:
    def test_the_same_text_is_left_alone(self, desk, monkeypatch):
        desk.build(TEXT)
        before = desk.head()
        monkeypatch.setattr(desk.engine, "recompute", lambda *args, **kwargs: pytest.fail("recomputed"))
        report = desk.edit(TEXT)
        assert report.outcome == "unchanged"
        assert "is cached" in report.reason
        assert report.record == desk.head() == before

    def test_editing_twice_with_the_same_text(self, desk):
        desk.build(TEXT)
        assert desk.edit(SAME).outcome == "repaired"
        assert desk.edit(SAME).outcome == "unchanged"
        assert desk.head().version == 2

    def test_another_text_of_the_same_tokens(self, zoo, desk_of, tmp_path):
        """The text is stored; no row is computed anew."""
        folder = lowercasing(zoo("llama"), tmp_path / "lower")
        desk = desk_of(Engine.open(str(folder)))
        desk.build(TEXT)
        before = desk.loaded()
        report = desk.edit(TEXT.upper())
        assert report.outcome == "repaired"
        assert report.to_json()["tokens"]["recomputed"] == 0
        assert report.to_json()["spans"] == []
        assert desk.store.snapshot(desk.head()).text == TEXT.upper()
        assert desk.head().debt.state == "exact"
        assert equal(desk.loaded(), before)


def lowercasing(model, folder):
    """A copy of a model whose tokenizer knows no capital letters."""
    import shutil

    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(tokenizer))
    return folder


class TestEmpty:
    def test_a_document_may_become_empty_and_come_back(self, desk):
        desk.build(TEXT)
        report = desk.edit("")
        assert (report.outcome, report.reason) == ("reprefilled", "the document is empty now")
        assert (desk.head().num_tokens, desk.head().debt.state) == (0, "exact")
        json.dumps(report.to_json(), allow_nan=False)
        assert desk.edit("").outcome == "unchanged"
        report = desk.edit(SAME)
        assert (report.outcome, report.reason) == ("reprefilled", "the document was empty")
        assert equal(desk.loaded(), desk.fresh(SAME))
        assert desk.head().version == 3

    @pytest.mark.parametrize(("before", "after"), [(TEXT, ""), ("", TEXT)])
    def test_a_dry_run(self, desk, before, after):
        desk.build(before)
        report = desk.edit(after, dry_run=True)
        assert report.outcome == "planned"
        assert report.reason
        assert desk.head().version == 1


class TestStrategy:
    def test_a_short_suffix_is_recomputed_whole(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], k=300)
        assert report.outcome == "reprefilled"
        assert report.plan.strategy == "suffix"
        assert "the repair would recompute every row after the edit" in report.reason

    def test_a_suffix_of_twice_the_repair_is_cheap_enough(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], k=120)
        assert report.plan.strategy == "suffix"
        assert "is exact and costs no more than twice" in report.reason
        assert desk.head().debt.state == "exact"

    def test_a_long_one_is_repaired(self, desk):
        desk.build(TEXT)
        assert desk.edit(EDITS["growing"], k=10).outcome == "repaired"

    def test_repair_overrules_the_cost(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], k=120, strategy="repair")
        assert (report.outcome, report.plan.strategy) == ("repaired", "repair")
        assert desk.head().debt.state == "repaired"

    def test_an_edit_of_everything_is_a_full_prefill(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["all replaced"])
        assert report.plan.strategy == "full"
        assert report.outcome == "reprefilled"

    def test_the_exact_selector_needs_no_overruling(self, desk):
        desk.build(TEXT)
        report = desk.edit(SAME, selector="exact")
        assert (report.outcome, report.reason, report.plan.selector) == ("repaired", None, "exact")
        assert desk.head().debt.state == "exact"
        assert deviation(desk.loaded(), desk.fresh(SAME)) <= CACHE

    def test_full_clears_the_debt_of_earlier_edits(self, desk):
        """Also where a row in front of this edit is stale."""
        desk.build(TEXT)
        desk.edit(SAME, strategy="repair", k=2)
        assert desk.head().debt.state == "repaired"
        text = SAME.replace("Nobody else", "No one")
        desk.edit(text, strategy="full")
        assert deviation(desk.loaded(), desk.fresh(text)) <= CACHE
        assert desk.head().debt.state == "exact"

    def test_a_suffix_is_called_exact_only_if_it_is(self, desk):
        """Rows that an earlier edit left stale, in front of this one, belong to it."""
        desk.build(TEXT)
        desk.edit(SAME, strategy="repair", k=2)
        stale_from = desk.head().debt.exact_until
        text = SAME.replace("desk 4", "counter 4")
        assert desk.edit(text, k=10, dry_run=True).plan.strategy == "repair"
        report = desk.edit(text, k=120)
        assert report.plan.strategy == "suffix"
        assert "is exact" in report.reason
        assert report.plan.positions[0] == stale_from
        assert desk.head().debt.state == "exact"
        assert deviation(desk.loaded(), desk.fresh(text)) <= CACHE

    def test_the_budget_caps_the_edit(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["several spans"], k=10, budget=4, strategy="repair")
        assert len(report.plan.positions) == report.change.diff.num_span + 4


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"selector": "nearest"}, "unknown selector 'nearest'.*editlocal"),
            ({"k": -1}, "k=-1"),
            ({"budget": -5}, "budget=-5"),
            ({"strategy": "fast"}, "unknown strategy 'fast'.*suffix"),
            ({"on_low": "cry"}, "unknown on-low 'cry'.*keep"),
            ({"min_mr": 0.9, "verify": False}, "needs the oracle"),
        ],
        ids=str,
    )
    def test_what_makes_no_sense_is_refused(self, options, said):
        with pytest.raises(UsageError, match=said):
            EditOptions(**options)

    @pytest.mark.parametrize("selector", ["editlocal", "boundary", "random", "exact"])
    @pytest.mark.parametrize("k", [0, 1, 10_000])
    def test_selectors_and_k(self, desk, selector, k):
        desk.build(TEXT)
        report = desk.edit(EDITS["several spans"], selector=selector, k=k, strategy="repair", verify=False)
        assert report.outcome == "repaired"
        if selector in ("editlocal", "random"):
            assert len(report.plan.positions) - report.change.diff.num_span == min(
                3 * k, report.change.diff.num_new - report.change.diff.first - report.change.diff.num_span
            ) or (selector == "editlocal" and k == 10_000)

    def test_a_seed_decides_random(self, desk):
        desk.build(TEXT)
        plans = [desk.edit(SAME, selector="random", k=9, seed=s, dry_run=True).plan.positions for s in (1, 1, 2)]
        assert np.array_equal(plans[0], plans[1])
        assert not np.array_equal(plans[0], plans[2])


class TestDryRun:
    def test_plans_without_weights(self, zoo, desk, monkeypatch):
        desk.build(TEXT)
        before = desk.head()
        engine = Engine.open(str(zoo("llama")))
        document = desk.document(EDITS["growing"])
        report = edit(engine, desk.store, before, document, EditOptions(dry_run=True, k=5))
        assert report.outcome == "planned"
        assert report.to_json()["tokens"]["recomputed"] == report.change.diff.num_span + 5
        assert report.to_json()["cost"]["full"] == report.change.diff.num_new
        assert report.to_json()["timing_ms"]["total"] is None
        assert "_loaded" not in engine.__dict__
        assert desk.head() == before
        assert desk.store.gates() == []

    def test_says_what_would_overrule_it(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], k=300, dry_run=True)
        assert report.outcome == "planned"
        assert report.plan.strategy == "suffix"
        assert "every row after the edit" in report.reason

    def test_is_what_the_edit_then_does(self, desk):
        desk.build(TEXT)
        planned = desk.edit(EDITS["several spans"], k=5, dry_run=True)
        done = desk.edit(EDITS["several spans"], k=5)
        assert np.array_equal(planned.plan.positions, done.plan.positions)
        assert planned.to_json()["spans"] == done.to_json()["spans"]


class TestFailure:
    """The old entry stands."""

    @pytest.fixture
    def built(self, desk):
        desk.build(TEXT)
        return desk

    def unharmed(self, desk, before):
        assert desk.head() == before
        assert equal(desk.loaded(), desk.fresh(TEXT))
        assert desk.store.verify() == []

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("tensor", ["keys", "values"])
    def test_rows_that_are_not_finite(self, built, monkeypatch, bad, tensor):
        before, real = built.head(), built.engine.recompute

        def recompute(cache, positions, **kwargs):
            real(cache, positions, **kwargs)
            rows = dict(zip(("keys", "values"), cache.taken(positions), strict=True))
            rows[tensor][-1, 0, -1, 0] = bad
            cache.taken = lambda positions: tuple(rows.values())

        with monkeypatch.context() as patch:
            patch.setattr(built.engine, "recompute", recompute)
            with pytest.raises(NonFiniteError) as caught:
                built.edit(SAME, strategy="repair", k=4, verify=False)
        assert caught.value.exit_code == 1
        self.unharmed(built, before)

    def test_grown_past_the_context(self, built):
        before = built.head()
        with pytest.raises(DocumentError, match=r"tokens, but llama takes at most 512") as caught:
            built.edit(TEXT + "x" * 400)
        assert caught.value.exit_code == 3
        self.unharmed(built, before)

    def test_changed_by_another_meanwhile(self, built):
        stale_record = built.head()
        built.edit(SAME, strategy="repair")
        after = built.head()
        with pytest.raises(StoreBusyError):
            edit(built.engine, built.store, stale_record, built.document(EDITS["growing"]), EditOptions())
        assert built.head() == after
        assert built.store.snapshot(after).text == SAME

    def test_tokens_that_a_newer_tokenizer_would_not_give(self, built, monkeypatch):
        before, real = built.head(), built.engine.text.encode_all

        def newer(*texts):
            return [
                encoding._replace(token_ids=encoding.token_ids + (text == TEXT))
                for text, encoding in zip(texts, real(*texts), strict=True)
            ]

        with monkeypatch.context() as patch:
            patch.setattr(built.engine.text, "encode_all", newer)
            with pytest.raises(ModelMismatchError, match="gives other tokens than when it was built"):
                built.edit(SAME)
        self.unharmed(built, before)


class TestAbsolutePositions:
    """gpt2: rows that move are computed anew."""

    def test_same_length_is_repaired(self, desk_of):
        desk = desk_of("gpt2")
        desk.build(TEXT)
        report = desk.edit(SAME, k=4)
        assert (report.outcome, report.reason) == ("repaired", None)
        assert report.change.diff.length_preserving

    @pytest.mark.parametrize("strategy", ["auto", "repair"])
    @pytest.mark.parametrize("kind", ["growing", "shrinking", "before the first token"])
    def test_otherwise_the_suffix_is_recomputed(self, desk_of, kind, strategy):
        desk = desk_of("gpt2")
        desk.build(TEXT)
        report = desk.edit(EDITS[kind], k=4, strategy=strategy)
        assert report.outcome == "reprefilled"
        assert "do not simply turn with position, and rows have moved" in report.reason
        assert desk.head().debt.state == "exact"
        assert deviation(desk.loaded(), desk.fresh(EDITS[kind])) <= CACHE

    def test_nothing_moves_when_the_end_goes(self, desk_of):
        desk = desk_of("gpt2")
        desk.build(TEXT)
        before = desk.loaded()
        desk.edit(EDITS["last line deleted"], k=4)
        assert equal(desk.loaded(), before, desk.head().num_tokens)

    def test_edit_after_edit(self, desk_of):
        desk = desk_of("gpt2")
        desk.build(TEXT)
        for kind in ("growing", "shrinking", "appended", "same length"):
            desk.edit(EDITS[kind], k=4)
        assert desk.engine.rotations is None
        assert desk.loaded().token_ids.shape[0] == desk.head().num_tokens


class TestLengthDependentPositions:
    """LongRoPE: an edit that crosses the limit, or happens beyond it, voids the cache."""

    SHORT, LONG = "xy " * 80, "xy " * 80 + "cd " * 20  # 240 and 300 tokens; the limit is 256

    @pytest.mark.parametrize(
        ("before", "after"),
        [(SHORT, LONG), (LONG, SHORT), (LONG, LONG.replace("cd", "ce", 1))],
        ids=["up", "down", "above"],
    )
    def test_is_prefilled_whole(self, desk_of, before, after):
        desk = desk_of("llama-longrope")
        desk.build(before)
        report = desk.edit(after, k=4, strategy="repair")
        assert report.outcome == "reprefilled"
        assert "beyond 256 tokens this model's frequencies depend on the length" in report.reason
        assert len(report.plan.positions) == report.change.diff.num_new
        assert desk.head().debt.state == "exact"
        assert deviation(desk.loaded(), desk.fresh(after)) <= CACHE

    def test_below_it_repairs_as_usual(self, desk_of):
        desk = desk_of("llama-longrope")
        desk.build(self.SHORT)
        report = desk.edit("uv " + self.SHORT[:-9], k=4)
        assert report.outcome == "repaired"


class TestNormalUse:
    def test_one_forward_pass_over_the_planned_rows(self, desk, monkeypatch):
        """A repair may not hide a prefill."""
        desk.build(TEXT)
        passes = []
        real = desk.engine.run_pass
        monkeypatch.setattr(
            desk.engine,
            "run_pass",
            lambda this, ends=None: passes.append(sum(map(len, this.groups))) or real(this, ends),
        )
        report = desk.edit(EDITS["growing"], k=5, verify=False)
        assert passes == [len(report.plan.positions)]

    def test_the_stored_cache_is_the_one_that_was_judged(self, desk, monkeypatch):
        desk.build(TEXT)
        # all layers are there to be compared
        monkeypatch.setattr(repair, "streamed", lambda *stored, whole: streamed(*stored, whole=True))
        caches = spied(desk.engine, monkeypatch)
        report = desk.edit(EDITS["several spans"], k=5, strategy="repair", verify=False)
        (judged,) = caches
        assert report.quality.probes
        assert equal(desk.loaded(), judged, desk.head().num_tokens)

    def test_a_twin_is_left_alone(self, desk):
        desk.build(TEXT, TEXT)
        desk.edit(SAME, "a.md")
        assert desk.head("b.md").version == 1
        assert equal(desk.loaded("b.md"), desk.fresh(TEXT))

    @pytest.mark.parametrize("kind", ["growing", "last line deleted", "appended", "first token", "all replaced"])
    def test_measured_medians(self, desk, kind):
        desk.build(TEXT)
        report = desk.edit(EDITS[kind], k=5, measure=True).to_json()
        measured = report["measured"]
        assert measured["rounds"] >= 5
        assert measured["suffix_baseline"] in ("kvfix", "plain forward")
        assert report["timing_ms"]["suffix_prefill"] == measured["suffix_prefill_ms"]["median"] >= 0
        recomputed = report["tokens"]["recomputed"]
        assert report["speedup"]["compute_vs_suffix"] == (measured["speedup_suffix"]["median"] if recomputed else None)
        for figure in ("full_prefill_ms", "suffix_prefill_ms", "recompute_ms", "speedup_full", "speedup_suffix"):
            assert set(measured[figure]) == {"median", "p20", "p80", "best"}

    def test_bf16(self, desk_of):
        desk = desk_of("llama", dtype="bfloat16")
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], k=5, strategy="repair")
        assert desk.loaded().keys.dtype == torch.bfloat16
        assert equal(desk.loaded(), desk.fresh(TEXT), report.change.diff.first)
        assert desk.store.verify() == []
