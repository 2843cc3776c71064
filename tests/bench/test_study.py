"""The selector study on tiny random models: what is recorded, what is run once, and going on after a break."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfix.bench import case as case_module
from kvfix.bench import study as study_module
from kvfix.bench.answers import Query, ask
from kvfix.bench.caches import copied, prefill_behind
from kvfix.bench.case import Case, Choice
from kvfix.bench.records import DIAGNOSTIC, Records, key_of
from kvfix.bench.study import Study, run_study
from kvfix.bench.summary import summarise
from kvfix.engine import Continuation
from kvfix.errors import UsageError
from kvfix.selectors import SELECTORS
from tests.bench.made import HEAD, draft, some, turned
from tests.tolerances import CACHE, NATS

NUM_ITEMS = 3
CONTRACT = [
    *("id", "condition", "distance", "selector", "k", "kept", "dropped_reason"),
    *("mr", "flip", "kl_recovery", "margin_stale", "margin_repaired", "margin_fresh"),
    *("recompute_ms", "select_ms", "full_prefill_ms"),
]
STUDY = Study(("editlocal", "random", "exact"), (2, 4), num_seeds=3, num_transplanted=1)


@pytest.fixture(scope="module")
def engine(gated):
    return gated("llama")


@pytest.fixture(scope="module")
def items(engine):
    return some(engine, NUM_ITEMS)


def run(engine, items, study=STUDY, path=None):
    """The records of a study."""
    records = Records(path)
    for _ in run_study(engine, items, study, records):
        pass
    return records.all


@pytest.fixture(scope="module")
def records(engine, items):
    return run(engine, items)


def of(records, selector, **fields):
    return [r for r in records if r["selector"] == selector and all(r[name] == value for name, value in fields.items())]


class TestRecords:
    def test_one_for_each_way_and_one_for_the_item(self, records):
        ways = 2 * (1 + 3 + 1)
        assert len(records) == NUM_ITEMS * (1 + ways) + ways
        assert len(of(records, "stale")) == NUM_ITEMS
        assert len(of(records, "random", k=2)) == NUM_ITEMS * 3
        assert {r["seed"] for r in of(records, "editlocal")} == {0}
        assert {r["id"] for r in of(records, "transplant:exact")} == {records[0]["id"]}

    def test_they_say_what_the_contract_demands(self, records):
        for record in records:
            assert set(CONTRACT) <= set(record)
            assert record["schema"] == "kvfix.item/1"
            assert record["kept"]
            json.dumps(record, allow_nan=False)

    def test_exact_recovers_everything(self, records):
        for record in of(records, "exact") + of(records, "transplant:exact"):
            assert record["mr"] == pytest.approx(1, abs=1e-2)
            assert record["kl_recovery"] in (None, pytest.approx(1, abs=1e-2))
            assert record["margin_repaired"] == pytest.approx(record["margin_fresh"], abs=NATS)
            assert record["flip"] == record["flip_fresh"]

    def test_the_rows_are_counted_without_the_spans(self, records):
        for record in records:
            if record["selector"] == "exact":
                assert record["rows"] + record["span_rows"] < record["num_tokens"]
            elif record["selector"] != "stale" and "exact" not in record["selector"]:
                assert record["rows"] == record["k"]

    def test_only_diagnostics_are_told_the_answers(self, engine, items, monkeypatch):
        told = {}
        real = case_module.make_plan
        monkeypatch.setattr(
            case_module,
            "make_plan",
            lambda selector, context: told.update({selector.name: context}) or real(selector, context),
        )
        run(engine, items[:1], Study(tuple(SELECTORS), (4,)))
        assert {name for name, context in told.items() if context.diagnosis is not None} == set(DIAGNOSTIC)
        assert set(told) == set(SELECTORS)

    def test_nothing_before_the_edit_changes(self, records):
        assert all(r["upstream_unchanged"] for r in records if r["selector"] != "stale")
        assert all(r["upstream_error"] <= CACHE for r in of(records, "stale"))

    def test_what_is_copied_takes_no_time(self, records):
        assert all(r["recompute_ms"] is None for r in records if r["selector"].startswith("transplant:"))
        assert all(r["recompute_ms"] > 0 for r in records if r["selector"] in ("editlocal", "random", "exact"))

    def test_an_items_own_record_says_what_its_times_were_taken_with(self, records):
        assert all(r["versions"]["torch"] == torch.__version__ for r in of(records, "stale"))

    def test_staleness(self, records):
        for record in of(records, "stale"):
            assert record["severity"] == pytest.approx(record["margin_fresh"] - record["margin_stale"])
            assert record["prefers_old"] == (record["margin_stale"] <= 0)
            assert record["tokens_changed"] == record["span_rows"]
            assert record["drift"] > 0

    @pytest.mark.parametrize("grows", [True, False])
    def test_items_of_other_lengths(self, engine, grows):
        """Rows that move are turned: all of them recomputed, or copied, they are fresh ones."""
        tried = []
        for item in map(draft, range(3)):
            one, other = item.before, item.after.replace(" is", " is still, as ever,")
            moved = replace(item, before=one if grows else other, after=other if grows else one)
            tried += [moved, replace(turned(moved), id=f"turned-{item.id}")]
        found = run(engine, tried, Study(("exact", "editlocal"), (4,), num_transplanted=1))
        exact = of(found, "exact", kept=True) + of(found, "transplant:exact", kept=True)
        assert len(exact) >= 2
        assert all(record["mr"] == pytest.approx(1, abs=1e-2) for record in exact)


class TestDropped:
    def test_what_the_fresh_cache_answers_wrongly(self, engine, items, monkeypatch):
        monkeypatch.setattr(Case, "outcomes", lambda *arguments: pytest.fail("repaired all the same"))
        found = run(engine, [turned(items[0])])
        assert {r["dropped_reason"] for r in found} == {"fresh wrong"}
        assert len(found) == 1 + 2 * len(STUDY.choices())
        for record in of(found, "editlocal"):
            assert not record["kept"]
            assert record["mr"] is record["flip"] is record["recompute_ms"] is None
            assert record["margin_fresh"] < 0

    def test_where_nothing_is_to_be_recovered(self, engine, items):
        case = Case(engine, items[0])
        case.of_stale = case.of_fresh
        assert case.dropped_reason == "no margin gap"

    @pytest.mark.parametrize(("num_tokens", "reason"), [(560, "takes at most 512"), (500, "no room for")])
    def test_what_the_model_cannot_take(self, engine, items, num_tokens, reason):
        more = "x" * (num_tokens - len(engine.encode(items[0].before).token_ids))
        long = replace(items[0], id="long", before=more + items[0].before, after=more + items[0].after)
        found = run(engine, [long, items[0]])
        own = [r for r in found if r["id"] == "long"]
        assert len(own) == 1 + 2 * len(STUDY.choices())
        assert all(r["dropped_reason"].startswith("unusable: ") and reason in r["dropped_reason"] for r in own)
        assert all(r["kept"] for r in found if r["id"] != "long")
        assert summarise(found)["items"][0]["dropped"] == {"unusable": 1}
        assert summarise(own)["checks"]["upstream_max_abs_error"] is None

    def test_figures_that_are_not_finite(self, engine, items, monkeypatch):
        """The study goes on; what is no number is null."""

        def broken(self, choices):
            for one, repaired in real(self, choices):
                yield one, replace(repaired, margin=float("nan"))

        real = Case.outcomes
        monkeypatch.setattr(Case, "outcomes", broken)
        (record,) = of(run(engine, items[:1], Study(("editlocal",), (2,))), "editlocal")
        assert record["mr"] is record["margin_repaired"] is None

    def test_a_selector_that_cannot_choose(self, gated):
        shallow = gated("llama", num_hidden_layers=1)
        found = run(shallow, some(shallow, 1), Study(("deviation", "exact"), (4,)))
        (record,) = of(found, "deviation")
        assert record["dropped_reason"].startswith("selector: ")
        assert not record["kept"]
        assert record["margin_fresh"] > 0
        assert of(found, "exact")[0]["kept"]
        assert of(found, "stale")[0]["drift"] is None

    def test_an_unknown_selector(self):
        with pytest.raises(UsageError, match="unknown selector 'nosuch'"):
            Study(("nosuch",))


class TestGoingOn:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "records.jsonl"

    @pytest.mark.parametrize("cut", [1, 300, 0.5, 0.9])
    def test_after_a_break_in_the_middle_of_a_line(self, engine, items, records, path, cut):
        run(engine, items, path=path)
        whole = path.read_bytes()
        left = int(len(whole) * cut) if isinstance(cut, float) else len(whole) - cut
        path.write_bytes(whole[:left])
        again = run(engine, items, path=path)
        ordered = [json.loads(line) for line in path.read_text().splitlines()]
        assert again == ordered

        assert {key_of(r) for r in again} == {key_of(r) for r in records}
        assert len(again) == len(records)
        margins = {key_of(r): r["margin_repaired"] for r in records}
        assert {key_of(r): r["margin_repaired"] for r in again} == pytest.approx(margins, abs=NATS)

    def test_what_is_done_is_not_run_again(self, engine, items, path, monkeypatch):
        run(engine, items, path=path)
        before = path.read_bytes()
        monkeypatch.setattr(study_module, "Case", lambda *arguments: pytest.fail("run again"))
        run(engine, items, path=path)
        assert path.read_bytes() == before

    def test_another_k_is_run_alone(self, engine, items, path):
        run(engine, items, Study(("editlocal",), (2,)), path)
        records = Records(path)
        made = [
            r for progress in run_study(engine, items, Study(("editlocal",), (2, 4)), records) for r in progress.records
        ]
        assert [(r["selector"], r["k"]) for r in made] == [("editlocal", 4)] * NUM_ITEMS

    def test_an_items_records_are_on_disk_before_the_next(self, engine, items, path):
        for progress in run_study(engine, items, Study(("editlocal",), (2,)), Records(path)):
            assert len(path.read_text().splitlines()) == 2 * progress.num_done

    def test_another_text_under_a_known_id(self, engine, items, path):
        run(engine, items[:1], Study(("editlocal",), (2,)), path)
        changed = replace(items[0], before=HEAD + items[0].before, after=HEAD + items[0].after)
        with pytest.raises(UsageError, match="another text under the id"):
            run(engine, [changed], Study(("editlocal",), (2,)), path)

    def test_a_file_of_something_else(self, path):
        path.write_text('{"id": 1}\n')
        with pytest.raises(UsageError, match="not a record of `kvfix bench items`"):
            Records(path)


class TestOnce:
    def test_equal_rows_are_repaired_once(self, engine, items, monkeypatch):
        case = Case(engine, items[0])
        calls = []
        real = engine.recompute
        monkeypatch.setattr(engine, "recompute", lambda cache, at, **more: calls.append(at) or real(cache, at, **more))
        outcomes = list(case.outcomes([Choice("exact", 2), Choice("exact", 4), Choice("editlocal", 2)]))
        assert len(calls) == 2
        assert outcomes[0][1] is outcomes[1][1]

    def test_however_many_arms_are_in_memory(self, engine, items, monkeypatch):
        def margins():
            return [repaired.margin for _, repaired in Case(engine, items[0]).outcomes(STUDY.choices())]

        together = margins()
        monkeypatch.setattr("kvfix.bench.case.GROUP_BYTES", 1)
        assert margins() == pytest.approx(together, abs=NATS)

    def test_evidence_is_computed_once_and_counted_for_everyone(self, engine, items, monkeypatch):
        case = Case(engine, items[0])
        calls = []
        monkeypatch.setattr(case.insight._evidence, "query_attention", lambda ids: calls.append(ids) or np.ones(3))
        for _ in range(3):
            assert case.insight.query_attention((5, 6)).sum() == 3
        assert len(calls) == 1
        ((_, ms),) = case.insight._known.values()
        assert case.insight.saved_ms == pytest.approx(2 * ms)

    @pytest.mark.parametrize("name", ["llama", "mistral-window", "smollm3"])
    def test_what_two_texts_begin_with_is_prefilled_once(self, gated, monkeypatch, name):
        engine = gated(name)
        first, second = (engine.encode(draft(n).before).token_ids for n in (1, 2))
        before = engine.prefill(first)
        rows = []
        real = engine.recompute
        monkeypatch.setattr(engine, "recompute", lambda cache, at, **more: rows.extend(at) or real(cache, at, **more))
        for ids in (first, second, second[:30], np.concatenate([first, second])):
            del rows[:]
            cache = prefill_behind(engine, ids, 20, before)
            assert all(row > 20 for row in rows)
            assert bool(rows) == (len(ids) > len(first) or not np.array_equal(ids, first[: len(ids)]))
            fresh = engine.prefill(ids)
            for mine, theirs in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
                assert (mine[:, :, : len(ids)] - theirs).abs().max() <= CACHE * max(1, theirs.abs().max())

    def test_beyond_longropes_limit_nothing_is_shared(self, gated):
        engine = gated("llama-longrope")
        ids = np.random.default_rng(0).integers(5, 300, 300)
        cache = prefill_behind(engine, ids, 0, engine.prefill(ids[:100]))
        assert torch.equal(cache.keys, engine.prefill(ids).keys)


class TestAsking:
    """One question to many caches: the same as one after another, the whole question each time."""

    @pytest.mark.parametrize("question", [" Cargo 1 is", "x"])
    @pytest.mark.parametrize(("old", "new"), [(" oats", " rye"), ("", " rye"), (" oats", "")])
    def test_is_what_the_engine_says_one_by_one(self, engine, items, question, old, new):
        query = Query.of(engine, replace(items[0], question=question, old=old, new=new))
        texts = [items[0].before, items[0].after, items[1].before]
        caches = [engine.prefill(engine.encode(text).token_ids, room=query.room) for text in texts]
        rows = [copied(cache) for cache in caches]
        for cache, before, answer in zip(caches, rows, ask(engine, caches, query), strict=True):
            roomy = engine.prefill(cache.token_ids, room=200)
            means = {}
            for side, ids in (("new", query.new), ("old", query.old)):
                if ids:
                    logprobs = next(engine.answer_logprobs(roomy, [Continuation(query.question, ids)]))
                    means[side] = float(logprobs.gather(1, torch.tensor(ids)[:, None]).mean())
                    if side == "new":
                        assert (logprobs - answer.logprobs).abs().max() <= NATS
            assert answer.margin == pytest.approx(means.get("new", 0) - means.get("old", 0), abs=NATS)
            assert answer.continuation == engine.text.decode(engine.generate(roomy, [query.question], 16)[0])
            assert torch.equal(cache.keys[:, :, : len(cache)], before.keys[:, :, : len(cache)])
