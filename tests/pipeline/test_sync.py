"""Sync: what every document of a corpus needs, done in order, whatever happens to one of them."""

import gc
import os
import threading
import time
import weakref

import pytest

from kvfix.corpus import Skipped
from kvfix.engine import Engine
from kvfix.engine.gate import deviation
from kvfix.errors import ModelMismatchError, NonFiniteError, StoreNotWritableError, UsageError
from kvfix.pipeline import build as build_module
from kvfix.pipeline import model_pass as model_module
from kvfix.pipeline import sync as sync_module
from kvfix.pipeline.ahead import ahead
from kvfix.pipeline.changes import Walk, look, source_at
from kvfix.pipeline.model_pass import ModelPass
from kvfix.pipeline.plan import EditOptions
from kvfix.pipeline.sync import SyncOptions, planned, sync
from kvfix.pipeline.tally import Tally
from tests.pipeline.desk import TEXT, without_commit
from tests.tolerances import CACHE

NEW = TEXT.replace("30 days", "45 days")
K = EditOptions(k=4, strategy="repair")


def reports(desk, *paths, allow_empty=False, engine=None, **options):
    options = {"edit": K, "verify_sample": 0.0, **options}
    sources = [source_at(path, desk.store, Walk(), allow_empty) for path in paths or [desk.corpus]]
    return sync(engine or (lambda: desk.engine), desk.store, sources, SyncOptions(**options), Walk())


def run(desk, *paths, **options):
    return list(reports(desk, *paths, **options))


def outcomes(done):
    return {each.doc_id: each.outcome for each in done}


def no_model():
    pytest.fail("the model was opened")


def write(desk, **texts):
    for name, text in texts.items():
        (desk.corpus / f"{name}.md").write_text(text)


class TestOutcomes:
    def test_new_changed_unchanged(self, desk):
        desk.build(TEXT, "other")
        write(desk, a=NEW, c="a third")
        done = run(desk)
        assert outcomes(done) == {"b.md": "unchanged", "a.md": "repaired", "c.md": "built"}
        assert done[1].report.quality.num_skipped == 0
        assert done[1].report.clock.ms.get("full_prefill") is None
        assert desk.head().version == 2
        assert deviation(desk.loaded("c.md"), desk.fresh("a third")) <= CACHE
        assert outcomes(run(desk, engine=no_model)) == dict.fromkeys(["a.md", "b.md", "c.md"], "unchanged")

    def test_a_touch_is_nothing(self, desk):
        desk.build(TEXT)
        os.utime(desk.corpus / "a.md", (1, 1))
        assert outcomes(run(desk, engine=no_model)) == {"a.md": "unchanged"}

    def test_other_content_under_the_same_size_and_times_is_noticed(self, desk):
        desk.build(TEXT)
        path = desk.corpus / "a.md"
        before = path.stat()
        path.write_text(NEW)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert outcomes(run(desk)) == {"a.md": "repaired"}

    def test_empty_documents(self, desk):
        write(desk, a="", b=TEXT)
        assert outcomes(run(desk)) == {"a.md": "built", "b.md": "built"}
        write(desk, a=TEXT, b="")
        assert outcomes(run(desk)) == {"a.md": "reprefilled", "b.md": "reprefilled"}
        assert desk.head("b.md").num_tokens == 0
        assert outcomes(run(desk, engine=no_model)) == {"a.md": "unchanged", "b.md": "unchanged"}

    def test_a_single_file(self, desk):
        desk.build(TEXT, "other")
        write(desk, a=NEW, b="another", c="new")
        (desk.corpus / "b.md").unlink()
        assert outcomes(run(desk, desk.corpus / "a.md")) == {"a.md": "repaired"}

    def test_a_document_named_twice_is_done_once(self, desk):
        write(desk, a=TEXT)
        assert outcomes(run(desk, desk.corpus, desk.corpus / "a.md", desk.corpus)) == {"a.md": "built"}
        assert desk.head().version == 1

    def test_a_dry_run_does_nothing(self, desk):
        desk.build(TEXT, "other", "third")
        write(desk, a=NEW, d="new")
        (desk.corpus / "b.md").rename(desk.corpus / "e.md")
        (desk.corpus / "c.md").unlink()
        before = desk.store.documents()
        done = run(desk, engine=no_model, prune=True, dry_run=True)
        assert outcomes(done) == {"a.md": "planned", "d.md": "planned", "e.md": "planned", "c.md": "removed"}
        assert {each.doc_id: each.reason for each in done}["e.md"] == "it was b.md"
        assert desk.store.documents() == before
        assert outcomes(planned(look(None, [source_at(desk.corpus, None, Walk())])))["a.md"] == "planned"


class TestRenames:
    def test_a_rename_is_relinked_without_the_model(self, desk):
        desk.build(TEXT, "other")
        (desk.corpus / "a.md").rename(desk.corpus / "z.md")
        done = run(desk, engine=no_model)
        assert outcomes(done) == {"b.md": "unchanged", "z.md": "relinked"}
        assert done[1].origin == "a.md"
        assert desk.store.head(str(desk.corpus), "a.md") is None
        assert deviation(desk.loaded("z.md"), desk.fresh(TEXT)) <= CACHE
        assert desk.store.verify() == []

    def test_what_was_renamed_and_changed_is_built_and_the_old_name_listed(self, desk):
        desk.build(TEXT)
        (desk.corpus / "a.md").unlink()
        write(desk, z=NEW)
        assert outcomes(run(desk)) == {"a.md": "removed", "z.md": "built"}

    def test_a_rename_and_then_a_change_is_repaired(self, desk):
        desk.build(TEXT)
        (desk.corpus / "a.md").rename(desk.corpus / "z.md")
        run(desk)
        write(desk, z=NEW)
        assert outcomes(run(desk)) == {"z.md": "repaired"}

    def test_twins_that_move_take_one_cache_each(self, desk):
        desk.build(TEXT, TEXT)
        (desk.corpus / "a.md").rename(desk.corpus / "y.md")
        (desk.corpus / "b.md").rename(desk.corpus / "z.md")
        assert outcomes(run(desk, engine=no_model)) == {"y.md": "relinked", "z.md": "relinked"}

    def test_a_copy_has_the_cache_of_its_twin_and_goes_its_own_way(self, desk, monkeypatch):
        desk.build(TEXT)
        write(desk, b=TEXT)
        monkeypatch.setattr(desk.engine, "prefill", lambda *args, **kwargs: pytest.fail("prefilled"))
        (_, copy) = run(desk)
        assert (copy.doc_id, copy.outcome, copy.origin) == ("b.md", "relinked", "a.md")
        monkeypatch.undo()
        write(desk, b=NEW)
        assert outcomes(run(desk)) == {"a.md": "unchanged", "b.md": "repaired"}
        assert deviation(desk.loaded("a.md"), desk.fresh(TEXT)) <= CACHE
        (desk.corpus / "a.md").unlink()
        run(desk, prune=True)
        assert desk.store.verify() == []
        assert len(desk.loaded("b.md")) == len(desk.fresh(NEW))

    def test_new_twins_are_prefilled_once(self, desk):
        write(desk, a=TEXT, b=TEXT)
        assert outcomes(run(desk)) == {"a.md": "built", "b.md": "relinked"}

    def test_a_repaired_twin_is_no_origin(self, desk):
        desk.build(TEXT)
        write(desk, a=NEW)
        run(desk)
        assert desk.head().state == "repaired"
        write(desk, b=NEW)
        assert outcomes(run(desk)) == {"a.md": "unchanged", "b.md": "built"}
        assert desk.head("b.md").state == "exact"

    def test_one_that_changes_before_it_is_relinked_is_built(self, desk, monkeypatch):
        desk.build(TEXT)
        (desk.corpus / "a.md").rename(desk.corpus / "z.md")
        real = sync_module.look

        def looked(*args):
            found = real(*args)
            write(desk, z=NEW)
            return found

        monkeypatch.setattr(sync_module, "look", looked)
        assert outcomes(run(desk)) == {"z.md": "built"}
        assert desk.head("z.md").num_tokens == len(desk.fresh(NEW))


class TestRemoved:
    def test_listed_and_kept(self, desk):
        desk.build(TEXT, "other")
        (desk.corpus / "b.md").unlink()
        done = run(desk, engine=no_model)
        assert outcomes(done) == {"a.md": "unchanged", "b.md": "removed"}
        assert done[1].record == desk.head("b.md")

    def test_pruned_when_asked(self, desk):
        desk.build(TEXT, "other")
        (desk.corpus / "b.md").unlink()
        assert outcomes(run(desk, engine=no_model, prune=True)) == {"a.md": "unchanged", "b.md": "pruned"}
        assert outcomes(run(desk, prune=True)) == {"a.md": "unchanged"}
        write(desk, b="other")
        assert outcomes(run(desk)) == {"a.md": "unchanged", "b.md": "built"}

    @pytest.mark.parametrize("what", ["missing", "empty", "excluded"])
    def test_a_corpus_that_is_not_there_is_refused(self, desk, what):
        desk.build(TEXT, "other")
        for path in list(desk.corpus.iterdir()):
            path.unlink() if what != "excluded" else path.rename(path.with_suffix(".html"))
        if what == "missing":
            desk.corpus.rmdir()
        with pytest.raises(UsageError, match=r"the store knows 2 of its documents.*--allow-empty"):
            run(desk, prune=True)
        assert len(desk.store.documents()) == 2
        done = run(desk, engine=no_model, prune=True, allow_empty=True)
        assert outcomes(done) == {"a.md": "pruned", "b.md": "pruned"}

    def test_an_unknown_corpus_is_refused_in_any_case(self, desk, tmp_path):
        with pytest.raises(UsageError, match="no such directory"):
            run(desk, tmp_path / "nowhere", allow_empty=True)

    def test_what_the_patterns_no_longer_take_is_not_gone(self, desk):
        desk.build(TEXT, "other")
        sources = [source_at(desk.corpus, desk.store, Walk(exclude=("b.md",)))]
        assert [finding.key[1] for finding in look(desk.store, sources)] == ["a.md"]

    def test_what_lies_in_a_directory_that_cannot_be_walked_is_not_gone(self, desk, tmp_path):
        (desk.corpus / "sub").mkdir()
        desk.build(TEXT)
        (desk.corpus / "sub" / "x.md").write_text("inside")
        run(desk)
        (desk.corpus / "sub").rename(tmp_path / "elsewhere")
        (desk.corpus / "sub").symlink_to(tmp_path)
        done = run(desk, engine=no_model, prune=True)
        assert outcomes(done) == {"a.md": "unchanged", "sub/": "skipped"}
        assert desk.head("sub/x.md").num_tokens


class TestFailures:
    def test_the_rest_is_done(self, desk):
        desk.build(TEXT, "other", "third")
        write(desk, a=NEW, b="b" * 600, d="d" * 600)
        (desk.corpus / "c.md").write_bytes(b"caf\xe9 \xff")
        done = {each.doc_id: each for each in run(desk)}
        assert outcomes(done.values()) == {"a.md": "repaired", **dict.fromkeys(["b.md", "c.md", "d.md"], "skipped")}
        assert "not UTF-8 at byte 3" in done["c.md"].reason
        assert "600 tokens" in done["b.md"].reason
        assert done["b.md"].record == desk.head("b.md")
        assert done["d.md"].record is None

    @pytest.mark.parametrize("error", [NonFiniteError(), RuntimeError("out of memory\nand more"), ValueError()])
    def test_a_model_that_fails_on_one(self, desk, monkeypatch, error):
        desk.build(TEXT)
        write(desk, a=NEW, b="new")
        real = build_module._prefill

        def prefill(engine, jobs, progress):
            raise error

        monkeypatch.setattr(build_module, "_prefill", prefill)
        done = run(desk)
        assert outcomes(done) == {"a.md": "repaired", "b.md": "failed"}
        assert done[1].reason
        assert "and more" not in done[1].reason
        monkeypatch.setattr(build_module, "_prefill", real)
        assert outcomes(run(desk)) == {"a.md": "unchanged", "b.md": "built"}

    def test_a_damaged_entry_is_no_other_documents_business(self, desk):
        desk.build(TEXT, "other")
        detail = desk.store.detail(desk.head())
        path = desk.store._layout.object(detail.segments[0].name)
        path.chmod(0o644)
        path.write_bytes(b"")
        write(desk, a=NEW, b="another")
        done = {each.doc_id: each for each in run(desk)}
        assert done["a.md"].outcome == "failed"
        assert path.name in done["a.md"].reason
        assert done["b.md"].outcome in ("repaired", "reprefilled")

    def test_a_renamed_one_whose_record_is_damaged(self, desk):
        desk.build(TEXT, "other")
        path = desk.store._layout.record(desk.head().record_id)
        path.chmod(0o644)
        path.write_bytes(b"{}")
        (desk.corpus / "a.md").rename(desk.corpus / "z.md")
        write(desk, b="another")
        done = {each.doc_id: each for each in run(desk)}
        assert (done["z.md"].outcome, done["z.md"].record) == ("failed", None)
        assert done["b.md"].outcome in ("repaired", "reprefilled")

    def test_a_full_disk_ends_the_pass(self, desk, monkeypatch):
        write(desk, a=TEXT, b="b")

        def commit(*args, **kwargs):
            raise StoreNotWritableError

        monkeypatch.setattr(desk.store, "commit_base", commit)
        with pytest.raises(StoreNotWritableError):
            run(desk)

    def test_another_models_documents_end_it_before_it_begins(self, desk, zoo):
        desk.build(TEXT)
        write(desk, a=NEW, b="new")
        other = Engine.open(str(zoo("qwen2")))
        with pytest.raises(ModelMismatchError, match="weights"):
            run(desk, engine=lambda: other)
        assert [record.doc_id for record in desk.store.documents()] == ["a.md"]

    def test_a_file_that_changes_under_every_reading(self, desk, monkeypatch):
        desk.build(TEXT)
        from kvfix import corpus

        real = os.fstat
        ticks = iter(range(10**6))

        class Stat:
            def __init__(self, found):
                self.st_size, self.st_mtime_ns = found.st_size, next(ticks)

        monkeypatch.setattr(corpus.os, "fstat", lambda descriptor: Stat(real(descriptor)))
        (done,) = run(desk, engine=no_model)
        monkeypatch.undo()
        assert (done.outcome, done.reason) == ("skipped", "it changed while it was read, twice")

    @pytest.mark.parametrize("what", ["changed", "gone", "back"])
    def test_a_file_that_changes_between_the_look_and_the_work(self, desk, monkeypatch, what):
        desk.build(TEXT)
        write(desk, a=NEW)
        later = {"changed": NEW.replace("Nobody", "No one"), "back": TEXT}
        real = sync_module.look

        def looked(*args):
            found = real(*args)
            (desk.corpus / "a.md").unlink()
            if what in later:
                write(desk, a=later[what])
            return found

        monkeypatch.setattr(sync_module, "look", looked)
        (done,) = run(desk)
        expected = {"changed": ("repaired", "reprefilled"), "gone": ("skipped",), "back": ("unchanged",)}
        assert done.outcome in expected[what]
        if what == "changed":
            assert desk.store.snapshot(desk.head()).text == later[what]


class TestOrder:
    def test_changed_before_new_and_small_before_large(self, desk):
        desk.build("other " * 10, TEXT)
        write(desk, a="other " * 9 + "one", b=NEW, c="a third, longer", d="d")
        assert [each.doc_id for each in run(desk)] == ["a.md", "b.md", "d.md", "c.md"]

    def test_by_size_alone(self, desk):
        desk.build("other " * 10, TEXT)
        write(desk, a="other " * 9 + "one", b=NEW, c="a third, longer", d="d")
        assert [each.doc_id for each in run(desk, order="size")] == ["d.md", "c.md", "a.md", "b.md"]

    def test_what_a_budget_left_comes_first_the_next_time(self, desk):
        write(desk, a="a" * 30, b="b" * 20, c="c" * 10)
        first = run(desk, time_budget=0)
        assert outcomes(first) == {"c.md": "built", "b.md": "left", "a.md": "left"}
        assert "0 s was spent" in first[1].reason
        assert desk.store.left(str(desk.corpus)) == ["b.md", "a.md"]
        # smaller ones that have come since wait for their turn
        write(desk, d="d", e="e")
        assert [e.doc_id for e in run(desk, time_budget=0) if e.outcome == "built"] == ["b.md"]
        assert desk.store.left(str(desk.corpus)) == ["a.md", "d.md", "e.md"]
        # one file alone changes nothing about the others
        run(desk, desk.corpus / "d.md")
        assert desk.store.left(str(desk.corpus)) == ["a.md", "e.md"]
        assert [e.doc_id for e in run(desk) if e.outcome == "built"] == ["a.md", "e.md"]
        assert desk.store.left(str(desk.corpus)) == []

    def test_a_pass_that_was_broken_off_goes_on(self, desk):
        write(desk, a="a", b="bb", c="ccc")
        under_way = reports(desk)
        assert next(under_way).doc_id == "a.md"
        under_way.close()
        # all three shared a pass, and what was computed is stored
        assert outcomes(run(desk, engine=no_model)) == dict.fromkeys(["a.md", "b.md", "c.md"], "unchanged")

    def test_and_leaves_what_was_not_computed(self, desk):
        names = "abcdefghijklmnop"
        write(desk, **{name: name * (300 + n) for n, name in enumerate(names)})
        under_way = reports(desk)
        assert next(under_way).doc_id == "a.md"
        under_way.close()
        again = outcomes(run(desk))
        assert again["a.md"] == "unchanged"
        assert again["p.md"] == "built"
        assert desk.store.verify() == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"order": "colour"},
            {"pack_rows": 0},
            *({"verify_sample": share} for share in (1.5, -0.1, float("nan"))),
        ],
    )
    def test_options_that_make_no_sense(self, wrong):
        with pytest.raises(UsageError):
            SyncOptions(**wrong)


class TestSample:
    def test_all_or_none(self, desk):
        desk.build(TEXT, TEXT + "b")
        write(desk, a=NEW, b=NEW + "b")
        done = run(desk, verify_sample=1.0)
        assert [each.sampled for each in done] == [True, True]
        assert all("full_prefill" in each.report.clock.ms for each in done)

    def test_the_sample_depends_on_the_seed_and_not_on_the_order(self, desk):
        from kvfix.corpus import document_of

        documents = [document_of("/x", f"{n}.md", "text") for n in range(400)]

        def drawn(seed):
            options = SyncOptions(edit=EditOptions(seed=seed), verify_sample=0.25)
            this = ModelPass(desk.engine, desk.store, options, Walk(), lambda line: None)
            return [document.doc_id for document in documents if this._is_sampled(document)]

        assert 60 < len(drawn(0)) < 140
        assert drawn(0) == drawn(0) != drawn(1)

    def test_a_low_mr_is_escalated_and_told(self, desk, monkeypatch):
        from dataclasses import replace

        from kvfix.pipeline import repair as repair_module

        real = repair_module.judge

        def low(*arms, **facts):
            found = real(*arms, **facts)
            return replace(found, probes=tuple(replace(p, mr=0.3) for p in found.probes))

        monkeypatch.setattr(repair_module, "judge", low)
        desk.build(TEXT, TEXT + "b")
        write(desk, a=NEW, b=NEW + "b")
        tally = Tally(0.9)
        for done in run(desk, verify_sample=1.0):
            tally.add(done)
            assert done.to_json()["escalated_to"] == "exact"
            assert done.outcome == "reprefilled"
        assert tally.quality() == {
            "num_sampled": 2,
            "num_mr": 2,
            "mr_sample_median": 0.3,
            "num_low": 2,
            "num_escalated": 2,
        }
        assert "the median MR of 2 sampled repairs was 0.300" in tally.warnings()[0]
        assert desk.head().state == desk.head("b.md").state == "exact"


class TestAhead:
    def test_two_steps_at_most_and_in_order(self):
        begun = []
        seen = []
        for item, future in ahead(range(6), lambda n: begun.append(n) or n * 2):
            assert future.result() == item * 2
            seen.append(item)
            assert len(begun) <= len(seen) + 2
        assert seen == list(range(6))

    def test_it_runs_in_another_thread_while_we_work(self):
        ours, reached = threading.get_ident(), threading.Event()

        def prepare(n):
            if n == 1:
                reached.set()
            return threading.get_ident()

        steps = ahead(range(3), prepare)
        _, future = next(steps)
        assert future.result() != ours
        assert reached.wait(10)
        steps.close()

    def test_what_it_raises_comes_at_its_turn(self):
        def prepare(n):
            if n == 1:
                raise ValueError("one")
            return n

        futures = [future for _, future in ahead(range(3), prepare)]
        assert [futures[0].result(), futures[2].result()] == [0, 2]
        with pytest.raises(ValueError, match="one"):
            futures[1].result()

    def test_closing_it_drops_the_rest(self):
        begun = []
        steps = ahead(range(100), begun.append)
        next(steps)
        steps.close()
        assert len(begun) <= 3
        assert not [t for t in threading.enumerate() if t.name.startswith("kvfix-ahead")]

    def test_no_more_than_a_few_documents_are_held(self, desk, monkeypatch):
        """Two are ready or under way, one is being built, and the next waits for those that may share its pass."""
        write(desk, **{chr(97 + n): f"{n} " * 150 for n in range(9)})
        alive = weakref.WeakSet()
        real, most = model_module.Ready, [0]

        def ready(*args, **kwargs):
            made = real(*args, **kwargs)
            alive.add(made)
            gc.collect()
            most[0] = max(most[0], len(alive))
            return made

        monkeypatch.setattr(model_module, "Ready", ready)
        assert len(list(reports(desk))) == 9
        assert most[0] <= 5


class TestPacks:
    def sizes(self, desk, monkeypatch):
        """How many documents each pass over several has had."""
        sizes, real = [], desk.engine.prefill_many
        monkeypatch.setattr(desk.engine, "prefill_many", lambda texts: sizes.append(len(texts)) or real(texts))
        return sizes

    def test_new_documents_share_passes_and_equal_single_builds(self, desk, monkeypatch):
        sizes = self.sizes(desk, monkeypatch)
        texts = {f"p{n:02}": f"{n:02} " * 33 for n in range(12)}
        write(desk, **texts)
        done = run(desk)
        assert [each.outcome for each in done] == ["built"] * 12
        assert [each.doc_id for each in done] == sorted(f"{name}.md" for name in texts)
        assert sizes == [5, 5, 2]
        for name, text in texts.items():
            assert deviation(desk.loaded(f"{name}.md"), desk.fresh(text)) <= CACHE
        assert sum(each.timing_ms["prefill"] for each in done) > 0
        assert all(each.timing_ms["persist"] > 0 for each in done)

    def test_the_order_is_kept_around_what_is_no_build(self, desk, monkeypatch):
        desk.build(TEXT, "kept")
        sizes = self.sizes(desk, monkeypatch)
        write(desk, a=NEW, c="c" * 100, d="d" * 110, e="x" * 900, f="f" * 500, g="g" * 501)
        monkeypatch.setattr(build_module, "PACK_ROWS", 2000)
        done = run(desk, order="size")
        assert [(each.doc_id, each.outcome) for each in done] == [
            ("b.md", "unchanged"),
            ("c.md", "built"),
            ("d.md", "built"),
            ("a.md", "repaired"),
            ("f.md", "built"),
            ("g.md", "built"),
            ("e.md", "skipped"),
        ]
        assert sizes == [2, 2]

    def test_one_that_fails_does_not_take_the_others_with_it(self, desk, monkeypatch):
        write(desk, a="a" * 50, b="b" * 51, c="c" * 52)
        real = build_module._prefill

        def prefill(engine, jobs, progress):
            if any(job.document.doc_id == "b.md" for job in jobs):
                raise RuntimeError("out of memory")
            return real(engine, jobs, progress)

        monkeypatch.setattr(build_module, "_prefill", prefill)
        done = run(desk)
        assert [(each.doc_id, each.outcome) for each in done] == [
            ("a.md", "built"),
            ("b.md", "failed"),
            ("c.md", "built"),
        ]
        assert "out of memory" in done[1].reason

    def test_a_pack_stays_within_the_memory(self, desk, monkeypatch):
        sizes = self.sizes(desk, monkeypatch)
        write(desk, **{f"p{n}": f"{n}" * 100 for n in range(6)})
        assert len(run(desk, memory=desk.engine.row_bytes * 200)) == 6
        assert sizes == [2, 2, 2]


class TestMemory:
    """Rows in memory do not depend on the number of documents, however slow the disk is."""

    @pytest.fixture
    def peak(self, desk, monkeypatch):
        """The most bytes of caches alive at once, with a store that takes its time."""
        alive, most = [], [0]
        real, commit = desk.engine.new_cache, desk.store.commit_base

        def new_cache(*args, **kwargs):
            cache = real(*args, **kwargs)
            alive.append((weakref.ref(cache), len(cache) * cache.row_bytes))
            alive[:] = [(reference, size) for reference, size in alive if reference() is not None]
            most[0] = max(most[0], sum(size for _, size in alive))
            return cache

        def slow(*args, **kwargs):
            time.sleep(0.02)
            return commit(*args, **kwargs)

        monkeypatch.setattr(desk.engine, "new_cache", new_cache)
        monkeypatch.setattr(desk.store, "commit_base", slow)
        return most

    @pytest.mark.parametrize("number", [6, 18])
    def test_it_is_bounded(self, desk, peak, number):
        write(desk, **{f"p{n:02}": f"{n:02}" * 150 for n in range(number)})
        memory = desk.engine.row_bytes * 950
        done = run(desk, memory=memory)
        assert [each.outcome for each in done] == ["built"] * number
        assert 0.9 * memory <= peak[0] <= memory

    def test_one_document_is_always_allowed_by_itself(self, desk, peak):
        write(desk, a="a" * 300, b="b" * 301, c="c" * 10, d="d" * 11)
        done = run(desk, memory=desk.engine.row_bytes * 100)
        assert outcomes(done) == dict.fromkeys(["c.md", "d.md", "a.md", "b.md"], "built")
        assert peak[0] == desk.engine.row_bytes * 301
        tally = Tally(0.9, memory=desk.engine.row_bytes * 100)
        for each in done:
            tally.add(each)
        assert tally.warnings() == [
            "documents that alone take more than the memory allowed, and were worked on by themselves: 2, the largest "
            f"b.md with {done[3].record.cache_bytes:,} bytes"
        ]

    def test_repairs_wait_for_room_too(self, desk, monkeypatch):
        desk.build(TEXT, TEXT + "b")
        write(desk, a=NEW, b=NEW + "b")
        begun, overlapped = threading.Event(), []
        compute, commit = model_module.recomputed, desk.store.commit_patch

        def computes(repairs):
            if repairs[-1].record.doc_id == "b.md":
                begun.set()
            return compute(repairs)

        def commits(*args):
            overlapped.append(begun.wait(0.3))
            return commit(*args)

        monkeypatch.setattr(model_module, "recomputed", computes)
        monkeypatch.setattr(desk.store, "commit_patch", commits)
        assert outcomes(run(desk, memory=1)) == {"a.md": "repaired", "b.md": "repaired"}
        assert overlapped == [False, True]


class TestBehind:
    def test_the_next_one_is_computed_while_one_is_stored(self, desk, monkeypatch):
        """The first commit does not end before the second document has been computed."""
        desk.build(TEXT, TEXT + "b")
        write(desk, a=NEW, b=NEW + "b")
        begun = threading.Event()
        compute, commit = model_module.recomputed, desk.store.commit_patch

        def computed(repairs):
            done = compute(repairs)
            if repairs[-1].record.doc_id == "b.md":
                begun.set()
            return done

        def commits(document, *args):
            assert begun.wait(20), "the model waited for the disk"
            return commit(document, *args)

        monkeypatch.setattr(model_module, "recomputed", computed)
        monkeypatch.setattr(desk.store, "commit_patch", commits)
        assert outcomes(run(desk, pack_rows=1)) == {"a.md": "repaired", "b.md": "repaired"}
        assert desk.store.verify() == []

    def test_a_failed_commit_is_one_documents_business(self, desk, monkeypatch):
        desk.build(TEXT, TEXT + "b", TEXT + "c")
        write(desk, a=NEW, b=NEW + "b", c=NEW + "c")
        without_commit(desk, monkeypatch, "b.md")
        done = run(desk)
        assert [(each.doc_id, each.outcome) for each in done] == [
            ("a.md", "repaired"),
            ("b.md", "failed"),
            ("c.md", "repaired"),
        ]
        assert done[1].record.version == 1

    def test_a_disk_that_fills_up_ends_the_pass_and_keeps_what_is_done(self, desk, monkeypatch):
        desk.build(*[f"{TEXT}{n}" for n in range(4)])
        write(desk, **{chr(97 + n): f"{NEW}{n}" for n in range(4)})
        commit = desk.store.commit_patch
        tried = []

        def commits(document, *args):
            tried.append(document.doc_id)
            if document.doc_id == "b.md":
                raise StoreNotWritableError
            return commit(document, *args)

        monkeypatch.setattr(desk.store, "commit_patch", commits)
        with pytest.raises(StoreNotWritableError):
            run(desk)
        assert tried == ["a.md", "b.md"]
        assert [record.version for record in desk.store.documents()] == [2, 1, 1, 1]
        monkeypatch.undo()
        assert list(outcomes(run(desk)).values()) == ["unchanged", *["repaired"] * 3]

    def test_a_copy_of_one_that_is_about_to_change_has_a_cache_of_its_own(self, desk, monkeypatch):
        desk.build(TEXT)
        write(desk, a=NEW, b=TEXT)
        commit = desk.store.commit_patch
        monkeypatch.setattr(desk.store, "commit_patch", lambda *args: time.sleep(0.1) or commit(*args))
        assert outcomes(run(desk)) == {"a.md": "repaired", "b.md": "built"}
        assert deviation(desk.loaded("b.md"), desk.fresh(TEXT)) <= CACHE


def test_an_unreadable_directory_is_no_document_in_the_states(desk):
    from kvfix.pipeline.sync import Synced

    desk.build(TEXT)
    tally = Tally(0.9)
    tally.add(Synced(str(desk.corpus), "sub/", "skipped", Skipped("sub/", "x").reason))
    tally.add(Synced(str(desk.corpus), "n.md", "skipped", "binary"))
    assert tally.num_failures == 2
    states = tally.states(desk.store, [str(desk.corpus)])
    assert states == {"exact": 1, "repaired": 0, "stale": 0, "missing": 0, "uncached": 1, "stale_rows": 0}
