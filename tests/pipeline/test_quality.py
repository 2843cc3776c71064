"""What a repair is worth: probes, arms, and what happens where the margin recovery is too low."""

import json
import math
from dataclasses import replace

import pytest
import torch

from kvfix.engine import Continuation
from kvfix.engine.gate import deviation
from kvfix.errors import LowQualityError
from kvfix.pipeline import quality
from kvfix.pipeline import repair as repair_module
from kvfix.pipeline.arms import Arm
from kvfix.pipeline.quality import Quality, judge
from kvfix.probes import GivenProbe, Probe
from tests.pipeline.desk import EDITS, TEXT, equal
from tests.tolerances import CACHE, NATS

SAME = EDITS["same length"]
PROBE = Probe("auto", "how many?", (5, 6), " 30", " 45", (7,), (8,))


def logprobs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def arm(margin: float, *continuation: str, distribution=None) -> Arm:
    return Arm([margin], [distribution], list(continuation) or None)


class TestJudge:
    """Arms into figures, by hand."""

    def test_all_three(self):
        found = judge(
            [PROBE],
            arm(1.0, " 45 days", distribution=logprobs(0.5, 0.5)),
            arm(-3.0, " 30 days", distribution=logprobs(0.9, 0.1)),
            arm(2.0, " 45 days", distribution=logprobs(0.4, 0.6)),
        )
        (probe,) = found.probes
        assert (probe.margin_stale, probe.margin_repaired, probe.margin_fresh) == (-3.0, 1.0, 2.0)
        assert probe.mr == pytest.approx(4 / 5)
        assert (probe.prefers_new, probe.flip, probe.flip_fresh, probe.counts) == (True, True, True, True)
        kl = [p * math.log(p / q) for p, q in ((0.4, 0.5), (0.6, 0.5), (0.4, 0.9), (0.6, 0.1))]
        assert probe.kl_recovery == pytest.approx(1 - sum(kl[:2]) / sum(kl[2:]), abs=1e-5)

    def test_the_repaired_arm_alone(self):
        (probe,) = judge([PROBE], arm(-0.5)).probes
        assert (probe.margin_stale, probe.margin_fresh, probe.mr, probe.kl_recovery, probe.flip) == (None,) * 5
        assert probe.prefers_new is False
        assert probe.counts

    def test_a_gap_within_the_noise_is_not_measured(self):
        def mr(noise):
            return judge([PROBE], arm(1.0), arm(0.0), arm(1.0), noise=noise).probes[0].mr

        assert mr(0.0) == 1.0
        assert mr(0.09) == 1.0
        assert mr(0.11) is None

    def test_a_given_probe_that_the_edit_does_not_touch_is_left_out(self):
        given = replace(PROBE, kind="given")
        found = judge([given], arm(1.0), arm(1.0), arm(1.01))
        assert found.counting == []
        assert found.mr_median is None
        assert found.to_json()["num_untouched"] == 1
        assert judge([given], arm(2.0), arm(1.0), arm(2.0)).counting

    def test_summaries(self):
        margins = [(-1.0, 1.0, 1.0), (-1.0, 0.0, 1.0), (-2.0, -3.0, -1.0)]  # stale, repaired, fresh
        arms = [Arm([m[n] for m in margins], [None] * 3, [" 45", " 30", ""]) for n in (1, 0, 2)]
        report = judge([PROBE] * 3, *arms, num_skipped=2).to_json()
        assert report["num_probes"] == 3
        assert report["num_skipped"] == 2
        assert report["mr_median"] == 0.5
        assert report["mr_mean"] == pytest.approx((1 + 0.5 - 1) / 3)
        assert report["prefers_new_rate"] == pytest.approx(1 / 3)
        assert report["flip_rate"] == pytest.approx(1 / 3)
        assert (report["num_kept"], report["mr_median_kept"]) == (2, 0.75)
        assert report["kl_recovery"] is None
        assert json.loads(json.dumps(report, allow_nan=False)) == report

    def test_nothing_asked(self):
        report = Quality().to_json()
        assert (report["num_probes"], report["probes"]) == (0, [])
        assert report["mr_median"] is report["prefers_new_rate"] is report["flip_rate"] is None


class TestArms:
    def test_stale_repaired_and_fresh_are_what_they_say(self, desk):
        """Every margin is computed a second time, from caches made here."""
        desk.build(TEXT)
        stale = desk.loaded(room=200)
        report = desk.edit(SAME, strategy="repair", k=5)
        (probe,) = report.quality.probes
        repaired = desk.loaded(room=200)
        fresh = desk.engine.prefill(desk.engine.encode(SAME).token_ids, room=200)
        text = desk.engine.text
        query = text.plain_ids("\n\nAs stated above: ") + text.plain_ids("Customers may return goods within ")
        assert report.quality.probes[0].old.strip() == "30"
        for cache, margin in (
            (stale, probe.margin_stale),
            (repaired, probe.margin_repaired),
            (fresh, probe.margin_fresh),
        ):
            means = []
            for answer in ("45", "30"):
                ids = text.plain_ids(answer)
                (found,) = desk.engine.answer_logprobs(cache, [Continuation(query, ids)])
                means.append(float(found.gather(1, torch.tensor(ids)[:, None]).mean()))
            assert margin == pytest.approx(means[0] - means[1], abs=NATS)
        assert probe.mr is None or probe.mr == pytest.approx(
            (probe.margin_repaired - probe.margin_stale) / (probe.margin_fresh - probe.margin_stale)
        )

    def test_an_exact_repair_recovers_everything(self, desk):
        desk.build(TEXT)
        report = desk.edit(EDITS["several spans"], strategy="suffix").to_json()["quality"]
        for probe in report["probes"]:
            assert probe["margin_repaired"] == pytest.approx(probe["margin_fresh"], abs=NATS)
            assert probe["flip"] == probe["flip_fresh"]
        # margins of a random model are small: not every one is measurable
        assert report["mr_median"] == pytest.approx(1.0, abs=1e-2)
        assert report["kl_recovery"] == pytest.approx(1.0, abs=1e-2)

    def test_no_oracle_without_verify(self, desk, monkeypatch):
        desk.build(TEXT)
        monkeypatch.setattr(desk.engine, "prefill", lambda *args, **kwargs: pytest.fail("prefilled"))
        report = desk.edit(SAME, strategy="repair", k=5, verify=False).to_json()
        assert report["quality"]["prefers_new_rate"] in (0.0, 1.0)
        assert report["quality"]["mr_median"] is None
        assert report["quality"]["flip_rate"] is None
        assert report["timing_ms"]["full_prefill"] is None
        assert report["speedup"] == {"compute_vs_full": None, "compute_vs_suffix": None, "end_to_end_vs_full": None}

    @pytest.mark.parametrize("kind", ["last line deleted", "appended", "all replaced", "before the first token"])
    def test_insertions_and_deletions(self, desk, kind):
        desk.build(TEXT)
        report = json.loads(json.dumps(desk.edit(EDITS[kind]).to_json(), allow_nan=False))
        for probe in report["quality"]["probes"]:
            assert math.isfinite(probe["margin_repaired"])
            assert (probe["flip"] is None) or (probe["old"] and probe["new"])

    def test_probes_share_a_room_or_take_turns(self, desk, monkeypatch):
        desk.build(TEXT)
        wide = desk.edit(EDITS["several spans"], strategy="repair", k=5, dry_run=False).to_json()["quality"]
        assert wide["num_probes"] == 3
        desk.build(TEXT, force=True)
        monkeypatch.setattr(quality, "ROOM_ROWS", 1)
        narrow = desk.edit(EDITS["several spans"], strategy="repair", k=5).to_json()["quality"]
        for one, other in zip(wide["probes"], narrow["probes"], strict=True):
            assert one["margin_repaired"] == pytest.approx(other["margin_repaired"], abs=NATS)
            assert one["flip"] == other["flip"]


class TestGivenProbes:
    GIVEN = (
        GivenProbe("How long?", "30 days", "45 days", "a.md"),
        GivenProbe("Elsewhere?", "x", "y", "b.md"),
        GivenProbe("\n\nDays: ", "30", "45"),
    )

    def test_those_of_the_document_are_asked(self, desk):
        desk.build(TEXT)
        report = desk.edit(SAME, probes=self.GIVEN, verify=False)
        assert [(p.kind, p.question) for p in report.quality.probes if p.kind == "given"] == [
            ("given", "How long?"),
            ("given", "\n\nDays: "),
        ]
        assert report.quality.probes[0].kind == "auto"

    def test_alone(self, desk):
        desk.build(TEXT)
        report = desk.edit(SAME, probes=self.GIVEN, auto_probes=False)
        assert {p.kind for p in report.quality.probes} == {"given"}

    def test_none_at_all(self, desk):
        desk.build(TEXT)
        report = desk.edit(SAME, auto_probes=False)
        assert report.quality.probes == ()
        assert report.outcome == "repaired"
        assert report.to_json()["quality"]["mr_median"] is None


class TestLength:
    def test_probes_too_long_for_the_context_are_left_out_with_a_warning(self, desk):
        text = TEXT + "x" * (500 - len(desk.engine.encode(TEXT).token_ids))
        desk.build(text)
        report = desk.edit(text.replace("30 days", "45 days"))
        assert report.outcome == "repaired"
        assert report.quality.probes == ()
        assert any("do not fit behind the document (limit 512 tokens)" in line for line in report.warnings)
        assert report.to_json()["warnings"] == list(report.warnings)

    def test_those_that_fit_are_asked(self, desk):
        text = TEXT + "x" * (440 - len(desk.engine.encode(TEXT).token_ids))
        desk.build(text)
        given = (GivenProbe("Why? " * 30, "30", "45"),)
        report = desk.edit(text.replace("A1", "C3"), probes=given)
        assert [p.kind for p in report.quality.probes] == ["auto"]
        assert "1 of 2 probes" in report.warnings[0]

    def test_longrope_keeps_probes_below_its_limit(self, desk_of):
        desk = desk_of("llama-longrope")
        text = TEXT[:240]
        desk.build(text)
        report = desk.edit(text.replace("30 days", "45 days"), k=4)
        assert report.outcome == "repaired"
        assert "limit 256 tokens" in report.warnings[0]


@pytest.fixture
def low(monkeypatch):
    """Let every repair be judged worthless; what is exact is judged as it is."""

    def set_to(mr):
        def judged(probes, *arms, **facts):
            found = judge(probes, *arms, **facts)
            return replace(found, probes=tuple(replace(p, mr=mr) for p in found.probes))

        monkeypatch.setattr(repair_module, "judge", judged)

    set_to(0.2)
    return set_to


class TestLow:
    def test_exact_recomputes_everything(self, desk, low):
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], k=4, min_mr=0.9)
        assert report.outcome == "reprefilled"
        assert "the median MR is 0.200, and at least 0.9 was asked for" in report.reason
        assert desk.head().debt.state == "exact"
        assert deviation(desk.loaded(), desk.fresh(EDITS["growing"])) <= CACHE

    def test_exact_includes_what_an_earlier_edit_left_stale(self, desk, low):
        desk.build(TEXT)
        desk.edit(SAME, k=2, strategy="repair")
        text = SAME.replace("Nobody else", "No one")
        desk.edit(text, k=2, strategy="repair", min_mr=0.9)
        assert desk.head().debt.state == "exact"
        assert deviation(desk.loaded(), desk.fresh(text)) <= CACHE

    def test_keep_stores_it_with_a_warning(self, desk, low):
        desk.build(TEXT)
        report = desk.edit(EDITS["growing"], k=4, min_mr=0.9, on_low="keep")
        assert (report.outcome, report.reason) == ("repaired", None)
        assert any("the median MR is 0.200" in line for line in report.warnings)
        assert desk.head().version == 2
        assert desk.head().last_mr == 0.2

    def test_fail_stores_nothing(self, desk, low):
        desk.build(TEXT)
        before = desk.head()
        with pytest.raises(LowQualityError, match=r"a\.md: the median MR is 0\.200.*nothing was stored") as caught:
            desk.edit(EDITS["growing"], k=4, min_mr=0.9, on_low="fail")
        assert caught.value.exit_code == 7
        assert desk.head() == before
        assert equal(desk.loaded(), desk.fresh(TEXT))

    def test_what_was_not_measured_counts_as_low(self, desk, low):
        low(None)
        desk.build(TEXT)
        with pytest.raises(LowQualityError, match="not measurable"):
            desk.edit(EDITS["growing"], k=4, min_mr=0.9, on_low="fail")
        assert desk.edit(EDITS["growing"], k=4, min_mr=0.9).outcome == "reprefilled"

    def test_good_enough_is_kept(self, desk, low):
        low(0.9)
        desk.build(TEXT)
        assert desk.edit(EDITS["growing"], k=4, min_mr=0.9, on_low="fail").outcome == "repaired"

    def test_what_is_exact_already_is_not_done_twice(self, desk, low, monkeypatch):
        desk.build(TEXT)
        calls = []
        real = desk.engine.recompute
        monkeypatch.setattr(desk.engine, "recompute", lambda c, p, **k: calls.append(len(p)) or real(c, p, **k))
        report = desk.edit(EDITS["growing"], strategy="suffix", min_mr=0.9)
        assert report.outcome == "reprefilled"
        assert len(calls) == 2  # the suffix, and the oracle
        assert any("0.200" in line for line in report.warnings)

    def test_nothing_is_asked_for_by_default(self, desk, low):
        desk.build(TEXT)
        assert desk.edit(EDITS["growing"], k=4).outcome == "repaired"


class TestEscalate:
    """k, twice k, four times k, exact: until the checks are content."""

    @pytest.fixture
    def judged(self, monkeypatch):
        """`judged(figure, until)` says the figure of every repair of fewer than `until` rows, and of larger ones 1."""

        def set_to(until, **worse):
            sizes = []
            real = repair_module.Repair.streamed
            monkeypatch.setattr(
                repair_module.Repair, "streamed", lambda self: sizes.append(len(self.plan.positions)) or real(self)
            )

            def judged(probes, *arms, **facts):
                found = judge(probes, *arms, **facts)
                said = worse if sizes[-1] < until else {"mr": 1.0, "prefers_new": True}
                return replace(found, probes=tuple(replace(p, **said) for p in found.probes))

            monkeypatch.setattr(repair_module, "judge", judged)
            return sizes

        return set_to

    @pytest.mark.parametrize(
        ("until", "ended", "num_attempts"), [(5, None, 1), (8, 8, 2), (12, 16, 3), (99, "exact", 4)]
    )
    @pytest.mark.parametrize("verify", [False, True], ids=["prefers_new", "mr"])
    def test_rows_grow_until_it_will_do(self, desk, judged, until, ended, num_attempts, verify):
        desk.build(TEXT)
        worse = {"mr": 0.2, "prefers_new": True, "margin_fresh": 1.0} if verify else {"prefers_new": False}
        sizes = judged(until, **worse)
        min_mr = 0.9 if verify else None
        report = desk.edit(SAME, k=4, strategy="repair", verify=verify, min_mr=min_mr, on_low="escalate")
        body = report.to_json()
        assert body["escalated_to"] == ended
        assert len(sizes) == len(body["attempts"]) == num_attempts
        assert sizes == sorted(set(sizes))
        assert body["attempts"][-1]["num_rows"] == body["tokens"]["recomputed"] == sizes[-1]
        assert desk.head().version == 2
        assert desk.store.detail(desk.head()).report.get("escalated_to") == ended
        if ended == "exact":
            assert report.outcome == "reprefilled"
            assert desk.head().debt.state == "exact"
            assert deviation(desk.loaded(), desk.fresh(SAME)) <= CACHE
        elif ended:
            assert (report.outcome, report.plan.k) == ("repaired", ended)
            assert f"k was raised to {ended}" in report.reason

    def test_a_budget_grows_with_k(self, desk, judged):
        desk.build(TEXT)
        sizes = judged(12, prefers_new=False)
        desk.edit(SAME, k=8, budget=4, strategy="repair", verify=False, on_low="escalate")
        assert sizes == [6, 10, 18]

    def test_an_adaptive_k_grows_from_what_it_came_to(self, desk, judged, monkeypatch):
        monkeypatch.setattr("kvfix.cost.ADAPTIVE_LEAST", 3)
        monkeypatch.setattr("kvfix.cost.ADAPTIVE_SHARE", 0.01)
        desk.build(TEXT)
        sizes = judged(12, prefers_new=False)
        report = desk.edit(SAME, k="adaptive", strategy="repair", verify=False, on_low="escalate")
        assert sizes == [5, 8, 14]
        assert report.to_json()["escalated_to"] == report.to_json()["k"] == 12

    def test_what_the_fresh_cache_gets_wrong_too_is_left(self, desk, judged):
        desk.build(TEXT)
        sizes = judged(99, prefers_new=False, mr=None, margin_fresh=-0.1)
        report = desk.edit(SAME, k=4, strategy="repair", min_mr=0.9, on_low="escalate")
        assert (len(sizes), report.to_json()["escalated_to"]) == (1, None)

    def test_insertions_have_no_old_answer_to_prefer(self, desk, judged):
        desk.build(TEXT)
        sizes = judged(99, prefers_new=False, old="")
        desk.edit(EDITS["growing"], k=4, strategy="repair", verify=False, on_low="escalate")
        assert len(sizes) == 1

    def test_it_ends_with_a_warning_where_exact_rows_do_not_help(self, desk, judged):
        desk.build(TEXT)
        judged(10**6, prefers_new=False)
        report = desk.edit(SAME, k=4, strategy="repair", verify=False, on_low="escalate")
        assert report.to_json()["escalated_to"] == "exact"
        assert "1 of 1 probes preferred the old text" in report.warnings


class TestWarnings:
    def test_what_nobody_should_overlook(self):
        from kvfix.pipeline.verdict import warnings_of

        arms = [Arm(margins, [None] * 2, None) for margins in ([-1.0, 1.0], [-0.5, 0.0], [2.0, 1.0])]
        said = warnings_of(judge([PROBE] * 2, *arms))
        assert said == [
            "on 1 of 2 probes the repaired cache still prefers the old text",
            "on 1 of 2 probes the repaired cache is worse than the stale one",
        ]
        assert warnings_of(judge([PROBE], arm(1.0), arm(0.0), arm(1.0))) == []
