"""Replays on a tiny model: what a record says, what the summary counts, where a replay ends and goes on."""

from __future__ import annotations

import json
import re
import shutil
import statistics

import pytest

from kvfix.bench.history import open_history
from kvfix.bench.records import Records
from kvfix.bench.replay import Replay, ReplayOptions, key_of
from kvfix.bench.replay_edit import neutral_probe
from kvfix.bench.replay_summary import mix, summary
from kvfix.cost import adaptive_k
from kvfix.errors import UsageError
from kvfix.metrics import KL_FLOOR
from kvfix.pipeline.quality import room_of
from tests.bench.test_history import Repo

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

BODY = "".join(
    f"Rule {n}: the ferry waits for nobody but the captain, and desk {n} closes at noon.\n" for n in range(9)
)
FIRST = "The fare is 30 crowns for a grown person.\n" + BODY


@pytest.fixture(scope="module")
def engine(gated):
    return gated("llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Repo:
    """Four edits that are repaired, one that is anew, and what is passed over."""
    repo = Repo(tmp_path_factory.mktemp("history"))
    texts = [FIRST, FIRST.replace("30", "45")]
    texts.append(texts[-1].replace("grown person", "grown person with a heavy trunk"))
    texts.append(texts[-1].replace("Rule 2: the ferry", "Rule 2: the boat").replace("desk 7 closes", "desk 7 opens"))
    texts.append(texts[-1].replace(BODY.splitlines(True)[4], ""))
    texts.append("zyxwvut ZYXWVUT 9876543210 " * 24)
    for text in texts:
        repo.commit({"ferry.md": text})
    repo.commit({"long.md": "x y " * 900, "empty.md": ""})
    repo.commit({"long.md": "x z " * 900, "empty.md": "Now full.\n"})
    return repo


def run(engine, repo: Repo, **options) -> tuple[list[dict], Replay]:
    options = {"max_tokens": 1200, "seed": 3, **options}
    known = Records(options.pop("out", None), key_of)
    replay = Replay(engine, open_history(repo.folder, seed=options["seed"]), ReplayOptions(**options), known)
    return list(replay.records()), replay


@pytest.fixture(scope="module")
def replayed(engine, repo) -> tuple[list[dict], Replay]:
    """Everything, with two selectors and two budgets; not to be changed."""
    return run(engine, repo, selectors=("editlocal", "exact"), ks=(8, "adaptive"))


class TestRecords:
    def test_one_an_edit_selector_and_k(self, replayed):
        records, replay = replayed
        repaired = [r for r in records if r["outcome"] == "repaired"]
        assert len(repaired) == 4 * 4
        assert len({key_of(r) for r in records}) == len(records) == 17
        assert {(r["selector"], r["k"]) for r in repaired} == set(replay.options.arms)
        assert all(r["schema"] == "kvfix.replay/1" and r["kind"] == "edit" for r in records)

    def test_what_the_edit_is_like(self, replayed, engine, repo):
        record = next(r for r in replayed[0] if r["length_preserving"])
        old, new = FIRST, FIRST.replace("30", "45")
        num, before = (len(engine.text.plain_ids(text)) for text in (new, "The fare is "))
        assert record["tokens"] == {"old": num, "new": num, "changed": 2, "suffix": num - before}
        assert (record["num_spans"], record["doc"], record["renamed"]) == (1, "ferry.md", False)
        assert record["edit_at"] == pytest.approx(before / num)
        assert len(engine.text.plain_ids(old)) == num

    def test_how_many_rows(self, replayed):
        for record in replayed[0]:
            if record["selector"] == "editlocal" and record["k"] == 8:
                assert record["k_rows"] == 8
                assert record["repaired_rows"] <= record["tokens"]["changed"] + 8 * record["num_spans"]
            if record["k"] == "adaptive":
                assert record["k_rows"] == adaptive_k(record["tokens"]["suffix"], record["num_spans"])
            if record["selector"] == "exact":
                assert record["repaired_rows"] == record["tokens"]["suffix"]

    def test_recomputing_all_recovers_all(self, replayed):
        exact = [r["quality"] for r in replayed[0] if r["selector"] == "exact"]
        probes = [p for quality in exact for p in quality["probes"]]
        assert [p["mr"] for p in probes if p["mr"] is not None] == pytest.approx(
            [1.0] * sum(p["mr"] is not None for p in probes), abs=1e-2
        )
        recovered = [q["neutral"]["kl_recovery"] for q in exact if q["neutral"]["kl_recovery"] is not None]
        assert recovered == pytest.approx([1.0] * len(recovered), abs=1e-3)
        assert recovered

    def test_both_kinds_of_question(self, replayed):
        for record in replayed[0]:
            if record["outcome"] != "repaired":
                continue
            quality = record["quality"]
            assert 1 <= quality["neutral"]["tokens"] <= 16
            assert 1 <= len(quality["probes"]) <= record["num_spans"]
            for asked in (*quality["probes"], quality["neutral"]):
                assert (asked["kl_recovery"] is None) == (asked["kl_stale"] < KL_FLOOR)
            for probe in quality["probes"]:
                assert (probe["prefers_new"] is None) == (probe["kind"] != "replaced")

    def test_times_and_ratios(self, replayed):
        for record in replayed[0]:
            if record["outcome"] == "repaired":
                ms = record["timing_ms"]
                compute = ms["select"] + ms["recompute"]
                assert record["speedup"]["compute_vs_full"] == pytest.approx(ms["full_prefill"] / compute)
                assert record["speedup"]["compute_vs_suffix"] == pytest.approx(ms["suffix_prefill"] / compute)

    def test_a_document_that_is_written_anew_is_counted_and_not_repaired(self, replayed):
        (record,) = [r for r in replayed[0] if r["outcome"] == "rewritten"]
        assert record["selector"] is record["k"] is record["quality"] is record["speedup"] is None
        assert record["chosen"] in ("suffix", "full")
        assert "90%" in record["reason"]

    def test_what_is_passed_over_is_counted(self, replayed):
        _, replay = replayed
        assert replay.skipped == {"longer than 1200 tokens": 1, "from or to an empty document": 1}


class TestSummary:
    def test_the_mix_by_hand(self, replayed):
        body = summary(replayed[1])
        edits = body["edits"]
        assert (edits["num_edits"], edits["num_rewritten"], edits["num_renamed"]) == (5, 1, 0)
        assert edits["length_preserving"] == pytest.approx(1 / 5)
        assert body["history"]["num_commits"] == 8
        skipped = {"added": 2, "from or to an empty document": 1, "longer than 1200 tokens": 1}
        assert body["history"]["skipped"] == skipped

    def test_mix_of_given_edits(self):
        def edit(old, new, changed, spans):
            tokens = {"old": old, "new": new, "changed": changed, "suffix": new // 2}
            flags = {"outcome": "repaired", "renamed": False, "length_preserving": old == new}
            return {"tokens": tokens, "num_spans": spans, "edit_at": 0.5, **flags}

        found = mix([edit(100, 100, 2, 1), edit(100, 140, 40, 1), edit(400, 420, 33, 2), edit(400, 380, 20, 4)])
        assert [found[name] for name in ("length_preserving", "one_span", "grows", "shrinks")] == [0.25, 0.5, 0.5, 0.25]
        assert (found["few_tokens"], found["small_share"]) == (0.5, 0.75)
        assert (found["spans"]["median"], found["changed_tokens"]["median"]) == (1.5, 26.5)

    def test_arms_by_hand(self, replayed):
        records, replay = replayed
        body = summary(replay)
        assert [(arm["selector"], arm["k"]) for arm in body["arms"]] == replay.options.arms
        arm = body["arms"][0]
        mine = [r for r in records if (r["selector"], r["k"]) == ("editlocal", 8)]
        assert sum(arm["chosen"].values()) == len(mine) + 1
        assert arm["chosen"]["repair"] == sum(r["chosen"] == "repair" for r in mine)
        shares = [r["repaired_rows"] / r["tokens"]["suffix"] for r in mine]
        assert arm["all"]["share_of_suffix"] == pytest.approx(sum(shares) / 4)
        probes = [p for r in mine for p in r["quality"]["probes"]]
        kl = arm["all"]["kl_touched"]
        assert kl["num"] + kl["num_under_floor"] == len(probes) == arm["all"]["num_probes"]
        neutral = arm["all"]["kl_neutral"]
        assert neutral["num"] + neutral["num_under_floor"] == 4
        assert arm["all"]["speedup_full"]["median"] > 0
        mine = [r for r in records if (r["selector"], r["k"]) == (arm["selector"], arm["k"]) and r["speedup"]]
        costs = [
            r["timing_ms"]["recompute"] * r["tokens"]["suffix"] / r["timing_ms"]["suffix_prefill"] / r["repaired_rows"]
            for r in mine
        ]
        assert arm["all"]["row_cost"] == pytest.approx(statistics.median(costs))
        assert arm["where_repair_is_chosen"]["num_edits"] == arm["chosen"]["repair"]

    def test_nothing_to_replay(self, engine, tmp_path):
        repo = Repo(tmp_path / "none")
        repo.commit({"a.md": "one\n"})
        records, replay = run(engine, repo)
        body = summary(replay)
        assert records == []
        assert body["edits"]["num_edits"] == 0
        assert body["arms"][0]["all"]["mr_median"] is None


class TestBounds:
    def test_most_edits(self, engine, repo):
        records, replay = run(engine, repo, max_edits=2, dry_run=True)
        assert len({r["commit"] for r in records}) == 2
        assert replay.stopped is None

    def test_the_time_left_is_told(self, engine, repo):
        said: list[str] = []
        options = ReplayOptions(dry_run=True, max_edits=2, time_budget=600)
        list(Replay(engine, open_history(repo.folder), options, notify=said.append).records())
        assert said[0] == "edit 1 of 2"
        assert re.fullmatch(r"edit 2 of 2, about \d+ (s|min) left", said[1])

    def test_the_time_budget(self, engine, repo):
        records, replay = run(engine, repo, time_budget=0.0)
        assert records == []
        assert "time budget" in replay.stopped

    def test_a_dry_run_computes_nothing(self, engine, repo, monkeypatch):
        monkeypatch.setattr(engine, "compute", pytest.fail)
        records, replay = run(engine, repo, dry_run=True, selectors=("editlocal", "attention"))
        assert {r["outcome"] for r in records} == {"planned", "rewritten"}
        assert all(r["chosen"] in ("repair", "suffix", "full") for r in records)
        assert summary(replay)["arms"][0]["all"]["num_probes"] == 0

    def test_a_replay_goes_on_where_it_was_broken_off(self, engine, repo, monkeypatch, tmp_path):
        out = tmp_path / "records.jsonl"
        first, _ = run(engine, repo, out=out, max_edits=3)
        with out.open("a") as file:
            file.write('{"schema": "kvfix.rep')
        rest, replay = run(engine, repo, out=out)
        assert not {key_of(r) for r in rest} & {key_of(r) for r in first}
        assert len(rest) + len(first) == len(replay.kept) == 5
        assert [json.loads(line) for line in out.read_text().splitlines()] == first + rest
        monkeypatch.setattr(engine, "compute", pytest.fail)
        again, replay = run(engine, repo, out=out)
        assert again == []
        assert summary(replay)["edits"]["num_edits"] == 5

    def test_a_dry_run_leaves_no_records(self, engine, repo, tmp_path):
        run(engine, repo, out=tmp_path / "records.jsonl", dry_run=True)
        assert not (tmp_path / "records.jsonl").exists()

    def test_a_file_of_something_else(self, tmp_path):
        (tmp_path / "x.jsonl").write_text('{"id": "a"}\n')
        with pytest.raises(UsageError, match=r"x.jsonl:1: not a record of `kvfix bench replay`"):
            Records(tmp_path / "x.jsonl", key_of, "bench replay")

    def test_selectors_that_look_at_the_stale_rows(self, engine, repo):
        records, _ = run(engine, repo, selectors=("attention", "deviation"), max_edits=3)
        repaired = [r for r in records if r["outcome"] == "repaired"]
        assert {r["selector"] for r in repaired} == {"attention", "deviation"}
        assert all(r["repaired_rows"] <= r["tokens"]["changed"] + 32 * r["num_spans"] for r in repaired)

    def test_keys_that_cannot_turn(self, engine, repo, monkeypatch):
        monkeypatch.setattr(engine, "rotations", None)
        records, _ = run(engine, repo)
        outcomes = {r["outcome"] for r in records}
        assert outcomes == {"repaired", "reprefilled", "rewritten"}
        assert all("turn with position" in r["reason"] for r in records if r["outcome"] == "reprefilled")

    @pytest.mark.parametrize(
        "options",
        [
            {"selectors": ("none",)},
            {"selectors": ("causal",)},
            {"ks": (-1,)},
            {"ks": ("all",)},
            {"ks": ()},
            {"max_edits": 0},
        ],
    )
    def test_options_that_make_no_sense(self, options):
        with pytest.raises(UsageError):
            ReplayOptions(**options)


@pytest.mark.parametrize(
    ("suffix", "spans", "expected"),
    [(100, 1, 32), (1000, 1, 150), (1001, 1, 151), (1000, 4, 38), (9000, 1, 256), (0, 0, 32)],
)
def test_an_adaptive_budget(suffix, spans, expected):
    assert adaptive_k(suffix, spans) == expected


def test_a_deleted_end_leaves_nothing_to_repair(engine, tmp_path):
    repo = Repo(tmp_path / "end")
    repo.commit({"a.md": FIRST})
    repo.commit({"a.md": FIRST.removesuffix(BODY.splitlines(True)[8])})
    (record,), replay = run(engine, repo)
    assert (record["tokens"]["suffix"], record["repaired_rows"], record["chosen"]) == (0, 0, "repair")
    assert record["speedup"] is record["timing_ms"]["suffix_prefill"] is None
    figures = summary(replay)["arms"][0]["all"]
    assert (figures["num_edits"], figures["share_of_suffix"], figures["speedup_full"]) == (1, None, None)


def test_documents_that_leave_no_room_for_a_question(engine, tmp_path):
    """The first ends where the model's context does, the second leaves room for the neutral question alone."""
    repo = Repo(tmp_path / "full")
    neutral = room_of(neutral_probe(engine))
    texts = {}
    for name, room in (("full.md", 8), ("nearly.md", neutral)):
        texts[name] = FIRST + "q" * (2048 - room - len(engine.text.plain_ids(FIRST)))
    repo.commit(texts)
    edited = {name: text.replace("30 crowns", "45 crowns") for name, text in texts.items()}
    repo.commit(edited)
    (record,), replay = run(engine, repo, max_tokens=4096, selectors=("attention",))
    assert record["doc"] == "nearly.md"
    assert record["quality"]["neutral"] is not None
    assert replay.skipped == {"too long for the model and a question": 1}
