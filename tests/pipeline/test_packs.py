"""Documents that share a pass: as many as may, equal to single ones, and none suffers for another."""

import gc
import threading
import weakref
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvfix.engine.gate import deviation
from kvfix.errors import NonFiniteError, StoreNotWritableError, UsageError
from kvfix.pipeline import repair as repair_module
from kvfix.pipeline.changes import Walk, source_at
from kvfix.pipeline.packs import Limits, together
from kvfix.pipeline.plan import EditOptions
from kvfix.pipeline.stream import PassingCache
from kvfix.pipeline.sync import SyncOptions, sync
from tests.pipeline.desk import EDITS, TEXT, equal, without_commit
from tests.tolerances import CACHE, NATS

NEW = TEXT.replace("30 days", "45 days")
K = EditOptions(k=4, strategy="repair")
KINDS = ["same length", "growing", "shrinking", "several spans", "last line deleted", "before the first token"]


def run(desk, notify=lambda line: None, **options):
    options = {"edit": K, "verify_sample": 0.0, **options}
    sources = [source_at(desk.corpus, desk.store, Walk())]
    return list(sync(lambda: desk.engine, desk.store, sources, SyncOptions(**options), Walk(), notify))


def name(n):
    return f"{chr(97 + n)}.md"


def edited(desk, *texts):
    """Documents a.md, b.md, … of which each was `TEXT` with its number behind, and is one of `texts`."""
    desk.build(*[f"{TEXT}{n}" for n in range(len(texts))])
    for n, text in enumerate(texts):
        desk.document(f"{text}{n}", name(n))


def outcomes(done):
    return {each.doc_id: each.outcome for each in done}


@pytest.fixture
def sizes(desk, monkeypatch):
    """How many documents each recomputing call has had."""
    found, real = [], desk.engine.recompute_many
    monkeypatch.setattr(desk.engine, "recompute_many", lambda jobs: found.append(len(jobs)) or real(jobs))
    return found


class Row(NamedTuple):
    num_rows: int
    held_rows: int


class TestLimits:
    def test_rows_and_memory(self):
        limits = Limits(10, 100)
        assert limits.allow([], Row(11, 101)), "one alone is always allowed"
        assert limits.allow([Row(6, 50)], Row(4, 50))
        assert not limits.allow([Row(6, 50)], Row(5, 50))
        assert not limits.allow([Row(6, 50)], Row(4, 51))

    def test_documents_without_rows_do_not_pile_up(self):
        assert Limits(10, 100).allow([Row(0, 1)] * 9, Row(0, 1))
        assert not Limits(10, 100).allow([Row(0, 1)] * 10, Row(0, 1))


class TestTogether:
    def calls(self, fails, error):
        """What `together` calls, each pack as a text; a call fails with `error` where `fails` says so."""
        seen = []

        def compute(pack):
            seen.append("".join(pack))
            if fails(pack):
                raise error
            return [letter.upper() for letter in pack]

        return seen, together(list("abcdefg"), compute)

    def test_one_call_where_it_succeeds(self):
        seen, done = self.calls(lambda pack: False, None)
        assert seen == ["abcdefg"]
        assert [future.result() for future in done] == list("ABCDEFG")

    @pytest.mark.parametrize(
        "error", [torch.OutOfMemoryError("GPU"), MemoryError(), RuntimeError("can't allocate memory")]
    )
    def test_halves_where_memory_runs_out(self, error):
        seen, done = self.calls(lambda pack: len(pack) > 2, error)
        assert seen == ["abcdefg", "abcd", "ab", "cd", "efg", "ef", "g"]
        assert [future.result() for future in done] == list("ABCDEFG")

    def test_one_by_one_where_anything_else_fails(self):
        seen, done = self.calls(lambda pack: "c" in pack, ValueError("c"))
        assert seen == ["abcdefg", *"abcdefg"]
        assert [future.exception() is None for future in done] == [letter != "c" for letter in "abcdefg"]
        with pytest.raises(ValueError, match="c"):
            done[2].result()

    def test_memory_that_is_short_for_one_is_that_ones_failure(self):
        seen, done = self.calls(lambda pack: "c" in pack, torch.OutOfMemoryError("GPU"))
        assert seen == ["abcdefg", "abcd", "ab", "cd", "c", "d", "efg"]
        assert [future.exception() is None for future in done] == [letter != "c" for letter in "abcdefg"]

    @pytest.mark.parametrize("error", [StoreNotWritableError(), UsageError(), KeyboardInterrupt()])
    def test_what_concerns_all_is_raised_at_once(self, error):
        seen = []

        def compute(pack):
            seen.append(pack)
            raise error

        with pytest.raises(type(error)):
            together(list("ab"), compute)
        assert len(seen) == 1

    def test_a_call_that_failed_keeps_nothing_alive(self):
        class Cache:
            pass

        kept = weakref.WeakSet()

        def compute(pack):
            gc.collect()
            assert not kept
            held = Cache()
            kept.add(held)
            raise torch.OutOfMemoryError

        assert len(together(list("abcd"), compute)) == 4


class TestRepairs:
    def test_share_a_pass_and_their_probes_too(self, desk, sizes, monkeypatch):
        edited(desk, *[NEW] * 5)
        asked, real = [], desk.engine.logits
        monkeypatch.setattr(desk.engine, "logits", lambda groups, rows: asked.append(len(groups)) or real(groups, rows))
        assert list(outcomes(run(desk)).values()) == ["repaired"] * 5
        assert (sizes, asked) == ([5], [2 * 5])

    @pytest.mark.parametrize("model", ["llama", "mistral-window", "gemma2", "gemma3", "gpt-oss", "cohere2", "smollm3"])
    def test_equal_single_ones(self, desk_of, model):
        found = []
        for pack_rows in (512, 1):
            desk = desk_of(model)
            edited(desk, *[EDITS[kind] for kind in KINDS])
            found.append((desk, run(desk, pack_rows=pack_rows)))
        (packed, done), (single, expected) = found
        assert outcomes(done) == outcomes(expected)
        for one, other in zip(done, expected, strict=True):
            assert np.array_equal(one.report.plan.positions, other.report.plan.positions)
            assert deviation(packed.loaded(one.doc_id), single.loaded(one.doc_id)) <= CACHE
            assert equal(packed.loaded(one.doc_id), single.loaded(one.doc_id), one.report.change.diff.first)
            mine, theirs = one.to_json(), other.to_json()
            for probe, like in zip(mine["quality"]["probes"], theirs["quality"]["probes"], strict=True):
                assert probe["margin_repaired"] == pytest.approx(like["margin_repaired"], abs=NATS)
            for field in ("tokens", "bytes", "version", "debt", "escalated_to", "strategy", "spans"):
                assert mine[field] == theirs[field]
        assert packed.store.verify() == []

    def test_sampled_ones_have_their_oracle(self, desk, sizes, monkeypatch):
        edited(desk, NEW, EDITS["shrinking"], NEW)
        monkeypatch.setattr(repair_module, "lacking", lambda quality, options: None)
        done = run(desk, verify_sample=1.0)
        assert sizes == [3]
        for each in done:
            text = each.report.document.text
            desk.build(f"{TEXT}{text[-1]}", force=True)
            (probe,), (like,) = each.report.quality.probes, desk.edit(text, k=4, strategy="repair").quality.probes
            assert each.sampled
            for figure in ("margin_stale", "margin_repaired", "margin_fresh"):
                assert getattr(probe, figure) == pytest.approx(getattr(like, figure), abs=NATS)
            assert (probe.flip, probe.flip_fresh) == (like.flip, like.flip_fresh)

    def test_beyond_the_length_where_frequencies_change_one_has_a_pass_of_its_own(self, desk_of):
        desk = desk_of("llama-longrope")
        short = TEXT[:200]
        desk.build(short + "0", TEXT + "1", short + "2")
        for n, text in enumerate((short, TEXT, short)):
            desk.document(text.replace("30 days", "45 days") + str(n), name(n))
        assert outcomes(run(desk)) == {"a.md": "repaired", "c.md": "repaired", "b.md": "reprefilled"}
        text = NEW + "1"
        assert deviation(desk.loaded("b.md"), desk.fresh(text)) <= CACHE

    def test_packs_stay_within_the_rows(self, desk, sizes):
        edited(desk, *[NEW] * 5)
        rows = len(run(desk, pack_rows=12)[0].report.plan.positions)
        assert rows == 6
        assert sizes == [2, 2, 1]

    def test_packs_stay_within_the_memory(self, desk, sizes):
        edited(desk, *[NEW] * 5)
        one = 2 * len(desk.fresh(NEW + "0")) * desk.engine.row_bytes
        assert list(outcomes(run(desk, memory=2 * one)).values()) == ["repaired"] * 5
        assert sizes == [2, 2, 1]

    def test_packs_stay_within_half_of_what_is_free_on_the_device(self, desk, sizes, monkeypatch):
        edited(desk, *[NEW] * 5)
        one = 2 * len(desk.fresh(NEW + "0")) * desk.engine.row_bytes
        monkeypatch.setattr(type(desk.engine), "free_bytes", 2 * 2 * one)
        assert list(outcomes(run(desk)).values()) == ["repaired"] * 5
        assert sizes == [2, 2, 1]

    def test_the_order_is_kept_around_others(self, desk, sizes):
        edited(desk, NEW, NEW, NEW, NEW, NEW)
        desk.document("", name(2))
        desk.document("new, and shorter than all", "f.md")
        done = [(each.doc_id, each.outcome) for each in run(desk, order="size")]
        assert done == [
            ("c.md", "reprefilled"),
            ("f.md", "built"),
            *[(name(n), "repaired") for n in (0, 1, 3, 4)],
        ]
        assert sizes == [4]

    def test_only_what_is_found_wanting_is_escalated_by_itself(self, desk, sizes, monkeypatch):
        edited(desk, NEW, EDITS["several spans"], NEW)
        real = repair_module.judge

        def judge(probes, *arms, **facts):
            found = real(probes, *arms, **facts)
            wanting = len(probes) == 3 and len(sizes) < 3
            return replace(found, probes=tuple(replace(p, prefers_new=not wanting) for p in found.probes))

        monkeypatch.setattr(repair_module, "judge", judge)
        done = run(desk)
        escalated = {each.doc_id: each.to_json()["escalated_to"] for each in done}
        assert escalated == {"a.md": None, "b.md": 16, "c.md": None}
        assert sizes == [3, 1, 1]

    def test_times_are_shares_of_the_pass(self, desk, monkeypatch):
        edited(desk, NEW, EDITS["growing"], NEW)
        monkeypatch.setattr(repair_module, "lacking", lambda quality, options: None)
        real, took = desk.engine.recompute_many, []

        def slow(jobs):
            real(jobs)
            threading.Event().wait(0.2)
            took.append(sum(len(positions) for _, positions in jobs))

        monkeypatch.setattr(desk.engine, "recompute_many", slow)
        done = run(desk)
        times = [each.to_json()["timing_ms"] for each in done]
        shares = [time["recompute"] / 200 for time in times]
        rows = [len(each.report.plan.positions) / took[0] for each in done]
        assert 1 <= sum(shares) < 3
        assert np.allclose(np.array(shares) / sum(shares), rows)
        steps = ("load", "diff", "select", "persist", "probes", "total")
        assert all(time[step] > 0 for time in times for step in steps)

    def test_what_is_under_way_is_said(self, desk):
        edited(desk, NEW, NEW, NEW)
        said = []
        run(desk, said.append)
        assert "working on a.md and 2 more" in said
        assert "recomputing 18 rows" in said

    def test_a_sync_that_is_broken_off_stores_what_it_computed(self, desk):
        """The second pass waits for room until the first one's documents are stored."""
        edited(desk, *[NEW] * 4)
        sources = [source_at(desk.corpus, desk.store, Walk())]
        num_rows = len(desk.fresh(NEW + "0"))
        # of two documents: a patch of as many rows, and two of the layers
        memory = 2 * (num_rows + -(-2 * num_rows // desk.engine.shape.layers)) * desk.engine.row_bytes
        options = SyncOptions(edit=K, verify_sample=0.0, memory=memory)
        under_way = sync(lambda: desk.engine, desk.store, sources, options, Walk())
        assert next(under_way).doc_id == "a.md"
        under_way.close()
        assert [desk.head(name(n)).version for n in range(4)] == [2, 2, 1, 1]
        assert list(outcomes(run(desk)).values()) == ["unchanged"] * 2 + ["repaired"] * 2
        assert desk.store.verify() == []

    def test_a_document_that_has_begun_is_finished(self, desk, sizes):
        edited(desk, *[NEW] * 4)
        done = run(desk, time_budget=0)
        assert [each.outcome for each in done] == ["repaired", "left", "left", "left"]
        assert sizes == [1]


class TestFailures:
    """One of four fails, and the others are repaired."""

    def others(self, done, failed="b.md"):
        found = {each.doc_id: each for each in done}
        one = found.pop(failed)
        assert set(outcomes(found.values()).values()) == {"repaired"}
        assert len(found) == 3
        return one

    def test_rows_that_are_not_finite(self, desk, sizes, monkeypatch):
        edited(desk, *[NEW] * 4)
        real, last = desk.engine.recompute_many, desk.fresh(NEW + "1").token_ids[-1]

        def spoils(jobs):
            real(jobs)
            for cache, positions in jobs:
                if cache.token_ids[-1] == last:
                    keys, values = cache.taken(positions)
                    keys[-1, 0, -1, 0] = torch.nan
                    cache.taken = lambda positions, rows=(keys, values): rows

        monkeypatch.setattr(desk.engine, "recompute_many", spoils)
        one = self.others(run(desk))
        assert (one.outcome, one.reason, one.record.version) == ("failed", NonFiniteError().message, 1)
        assert sizes[0] == 4

    def test_a_damaged_entry(self, desk, sizes, monkeypatch):
        edited(desk, *[NEW] * 4)
        real = repair_module.Repair.streamed

        def load(self):
            if self.record.doc_id == "b.md":
                raise OSError("cannot be read")
            return real(self)

        monkeypatch.setattr(repair_module.Repair, "streamed", load)
        one = self.others(run(desk))
        assert (one.outcome, one.record.version) == ("failed", 1)
        assert "cannot be read" in one.reason
        assert sizes == [1, 1, 1]

    def test_a_selector_that_cannot(self, desk):
        """Nothing leads to an edit at the very beginning, so that there is no question to look with."""
        edited(desk, NEW, EDITS["before the first token"], NEW, NEW)
        one = self.others(run(desk, edit=replace(K, selector="attention")))
        assert (one.outcome, one.record.version) == ("failed", 1)
        assert "needs a question" in one.reason

    def test_too_long(self, desk, sizes):
        edited(desk, NEW, "x" * 600, NEW, NEW)
        assert self.others(run(desk)).outcome == "skipped"

    def test_a_commit(self, desk, monkeypatch):
        edited(desk, *[NEW] * 4)
        without_commit(desk, monkeypatch, "b.md")
        assert self.others(run(desk)).outcome == "failed"


class TestMemory:
    """Where memory runs out a pack is halved, down to one document, and no entry is lost."""

    def short(self, target, attribute, monkeypatch, most, size=len):
        """Let a call fail for more than `most` documents."""
        found, real = [], getattr(target, attribute)

        def limited(*args, **kwargs):
            found.append(size(args[0]))
            if size(args[0]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*args, **kwargs)

        monkeypatch.setattr(target, attribute, limited)
        return found

    def test_in_the_pass(self, desk, monkeypatch):
        edited(desk, *[NEW] * 5)
        seen = self.short(desk.engine, "recompute_many", monkeypatch, 2)
        assert list(outcomes(run(desk)).values()) == ["repaired"] * 5
        assert seen == [5, 3, 2, 1, 2]
        for n in range(5):
            assert desk.head(name(n)).version == 2
        assert desk.store.verify() == []

    def test_in_the_probes(self, desk, monkeypatch):
        edited(desk, *[NEW] * 5)
        seen = self.short(
            desk.engine, "answer_logprobs_of", monkeypatch, 2, lambda jobs: len({id(cache) for cache, _ in jobs})
        )
        done = run(desk)
        assert list(outcomes(done).values()) == ["repaired"] * 5
        assert seen == [5, 3, 2, 1, 2]
        assert all(each.report.quality.probes for each in done)

    def test_where_the_caches_are_made(self, desk, monkeypatch):
        edited(desk, *[NEW] * 4)
        made, most, real = [], [0], PassingCache._allocate

        def allocate(*args):
            alive = sum(reference() is not None for reference in made)
            if alive == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            cache = real(*args)
            made.append(weakref.ref(cache.keys))
            most[0] = max(most[0], alive + 1)
            return cache

        monkeypatch.setattr(PassingCache, "_allocate", allocate)
        assert list(outcomes(run(desk)).values()) == ["repaired"] * 4
        # four for the rows, none for the questions; then each document's two
        assert (len(made), most) == (4 + 2 * 4, [4])

    @pytest.mark.parametrize("most", [0, 1])
    def test_one_alone(self, desk, monkeypatch, most):
        edited(desk, *[NEW] * 3)
        seen = self.short(desk.engine, "recompute_many", monkeypatch, most)
        done = run(desk)
        assert seen == [3, 2, 1, 1, 1]
        if most:
            assert list(outcomes(done).values()) == ["repaired"] * 3
            return
        assert list(outcomes(done).values()) == ["failed"] * 3
        for n, each in enumerate(done):
            assert each.reason == "OutOfMemoryError: CUDA out of memory"
            assert equal(desk.loaded(name(n)), desk.fresh(f"{TEXT}{n}"))

    @pytest.mark.parametrize("verb", ["sync", "build"])
    def test_builds(self, desk, monkeypatch, verb):
        seen = self.short(desk.engine, "prefill_many", monkeypatch, 2)
        texts = [f"{n} " * 40 for n in range(5)]
        if verb == "build":
            done = desk.build(*texts)
        else:
            for n, text in enumerate(texts):
                desk.document(text, name(n))
            done = run(desk)
        assert list(outcomes(done).values()) == ["built"] * 5
        assert seen == [5, 3, 2, 2]
        for n, text in enumerate(texts):
            assert deviation(desk.loaded(name(n)), desk.fresh(text)) <= CACHE
