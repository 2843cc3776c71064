"""kvfix sync: what cron sees - lines, summaries, exit codes, hooks, figures, and passes that are ended half-way."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import Engine, event

from kvfix.core import Debt
from kvfix.corpus import document_of
from kvfix.errors import StoreNotWritableError
from kvfix.store import Store, records
from kvfix.store.manifest import Change
from tests.cli.conftest import TEXTS
from tests.cli.test_process import COMMAND, ended_half_way


@pytest.fixture
def sync(place, at):
    """`sync(…)` on the corpus; with --json its lines and its summary."""

    def call(*arguments, paths=None):
        return at("sync", *(paths or [place.corpus]), "--strategy", "repair", *arguments)

    return call


@pytest.fixture
def lines(sync):
    def call(*arguments, code=0, paths=None):
        result = sync(*arguments, "--json", paths=paths)
        assert result.code == code, result.err
        *documents, summary = [json.loads(line, parse_constant=pytest.fail) for line in result.out.splitlines()]
        assert {line["schema"] for line in [*documents, summary]} <= {"kvfix.sync/1", "kvfix.refresh/1"}
        assert summary["summary"] is True
        return documents, summary

    return call


def outcomes(documents):
    return {line["doc"]: line["outcome"] for line in documents}


def in_process(*arguments, **more):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, **more)


def test_json_has_a_line_a_document_and_a_summary(place, lines):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    place.write("new.md", "A new page.")
    documents, summary = lines("--verify-sample", 1)
    assert outcomes(documents) == {
        "empty.md": "unchanged",
        "rules/deck.md": "unchanged",
        "ferry.md": documents[2]["outcome"],
        "new.md": "built",
    }
    ferry, new = documents[2:]
    assert ferry["outcome"] in ("repaired", "reprefilled")
    assert (ferry["corpus"], ferry["version"], ferry["sampled"]) == (str(place.corpus), 2, True)
    assert ferry["spans"][0]["new_text"] == "45"
    assert ferry["quality"]["num_probes"] == 1
    assert ferry["timing_ms"]["full_prefill"] > 0
    assert {"escalated_to", "attempts", "debt", "tokens", "speedup", "selector", "k"} <= set(ferry)
    assert (new["num_tokens"], new["version"], new["reason"]) == (11, 1, "new")
    assert new["timing_ms"]["prefill"] == round(new["timing_ms"]["prefill"], 3)
    totals = summary["totals"]
    assert totals["documents"] == 4
    assert (totals["built"], totals["unchanged"], totals["repaired"] + totals["reprefilled"]) == (1, 2, 1)
    assert (summary["num_sampled"], summary["hook"], summary["refresh"]) == (1, None, None)
    assert {"mr_sample_median", "num_low", "num_escalated", "warnings"} <= set(summary)
    assert sum(summary["states"][state] for state in ("exact", "repaired", "stale", "missing")) == 4


def test_a_pass_that_fails_half_way_says_so_in_its_last_line(place, sync, monkeypatch):
    """The lines before it stand for what was done."""

    def commit(*args, **kwargs):
        raise StoreNotWritableError("no space")

    place.write("new.md", "A new page.")
    monkeypatch.setattr(Store, "commit_base", commit)
    result = sync("--json")
    *documents, last = [json.loads(line) for line in result.out.splitlines()]
    assert set(outcomes(documents).values()) == {"unchanged"}
    assert (result.code, last["schema"]) == (9, "kvfix.error/1")
    assert last["error"] == {"code": "store_not_writable", "message": "no space", "exit_code": 9}


def test_people_see_what_was_done_and_a_summary(place, sync):
    place.write("new.md", "A new page.")
    (place.corpus / "rules" / "deck.md").unlink()
    result = sync()
    assert (result.code, result.out) == (0, "")
    *shown, summary = result.err.splitlines()
    assert [line.split()[0] for line in shown] == ["removed", "built"]
    assert re.fullmatch(r"1 built, 2 unchanged, 1 removed in .*s", summary)
    again = sync()
    assert again.err.startswith("removed")
    assert sync("--quiet").err == ""


def test_prune_drops_what_is_gone(place, sync, lines):
    place.ferry.unlink()
    documents, summary = lines()
    assert outcomes(documents)["ferry.md"] == "removed"
    assert summary["states"]["missing"] == 1
    documents, summary = lines("--prune")
    assert outcomes(documents)["ferry.md"] == "pruned"
    assert (summary["totals"]["pruned"], summary["states"]["missing"]) == (1, 0)
    assert "ferry.md" not in outcomes(lines()[0])


def test_a_rename_is_relinked(place, lines):
    place.ferry.rename(place.corpus / "boat.md")
    documents, summary = lines("--prune")
    assert outcomes(documents) == {"boat.md": "relinked", "empty.md": "unchanged", "rules/deck.md": "unchanged"}
    assert documents[0]["origin"] == "ferry.md"
    assert summary["totals"]["pruned"] == 0


def test_some_that_cannot_be_read(place, sync):
    place.write("cp1252.md", "caf\xe9".encode("cp1252"))
    place.write("new.md", "A new page.")
    result = sync("--quiet")
    assert (result.code, result.out) == (3, "")
    assert re.fullmatch(r"skipped +cp1252\.md: not UTF-8 at byte 3.*\n", result.err)
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_corpus_that_is_not_there(place, sync, at, what, tmp_path):
    kept = place.corpus.rename(tmp_path / "kept")
    if what == "empty":
        place.corpus.mkdir()
    try:
        result = sync("--prune", "--json")
        assert result.code == 2
        message = result.json["error"]["message"]
        assert "the store knows 3 of its documents" in message
        assert "--allow-empty" in message
        assert len(at("status", "--json").json["documents"]) == len(TEXTS)
        assert sync("--prune", "--allow-empty").code == 0
        assert at("status", "--json").json["documents"] == []
    finally:
        if what == "empty":
            place.corpus.rmdir()
        kept.rename(place.corpus)


def test_a_path_that_nobody_knows_makes_no_store(kvfix, tmp_path):
    for more in ([], ["--allow-empty"], ["--dry-run"]):
        result = kvfix("sync", "nowhere", "--store", "s", "--model", "no/such/model", *more, "--json")
        assert (result.code, result.json["error"]["code"]) == (2, "usage")
    assert not (tmp_path / "s").exists()


def test_a_dry_run_changes_nothing_and_makes_no_store(place, lines, kvfix, tmp_path, at):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    documents, summary = lines("--dry-run", "--prune", "--metrics", tmp_path / "m.prom", "--hook", "false")
    assert outcomes(documents)["ferry.md"] == "planned"
    assert (summary["totals"]["planned"], summary["hook"]) == (1, None)
    assert not (tmp_path / "m.prom").exists()
    assert at("status", "--json").json["totals"]["stale"] == 1
    first = kvfix("sync", place.corpus, "--store", "none", "--dry-run")
    assert first.code == 0
    assert first.err.endswith(" ms\n") or "3 planned" in first.err
    assert not (tmp_path / "none").exists()


def test_a_first_sync_makes_the_store(place, kvfix, model):
    result = kvfix("sync", place.corpus, "--store", "first", "--model", model, "--json")
    assert result.code == 0
    assert outcomes(map(json.loads, result.out.splitlines()[:-1])) == dict.fromkeys(TEXTS, "built")


def test_no_change_loads_no_model(place):
    """Neither torch nor transformers, and the model need not even be there."""
    code = (
        "import sys; from kvfix.cli.app import main\n"
        f"code = main(['sync', {str(place.corpus)!r}, '--store', {str(place.store)!r}, '--json', "
        "'--model', '/no/such/model', '--prune', '--refresh-budget', '10m'])\n"
        "sys.exit(code or ', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["totals"]["unchanged"] == len(TEXTS)


def test_renames_and_removals_load_none_either(place):
    place.ferry.rename(place.corpus / "boat.md")
    (place.corpus / "rules" / "deck.md").unlink()
    done = in_process("sync", place.corpus, "--store", place.store, "--model", "/no/such/model", "--prune")
    assert done.returncode == 0, done.stderr
    assert "1 relinked, 1 pruned" in done.stderr


@pytest.fixture
def asked(kvfix, monkeypatch):
    """`asked(command)` is how many statements the store's database was given, and how many paths were resolved."""
    counts = Counter()
    event.listen(Engine, "before_cursor_execute", lambda *args: counts.update(["statements"]))
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda *args, **more: counts.update(["paths"]) or real(*args, **more))

    def call(*arguments):
        counts.clear()
        assert kvfix(*arguments).code == 0
        return counts["statements"], counts["paths"]

    return call


def test_the_work_for_unchanged_documents_does_not_grow_with_their_number(tmp_path, asked):
    """But for reading and hashing each: the aim is 3 s for a sync and 1.5 s for a status of 10,000."""
    found = {}
    for number in (10, 200):
        corpus, place = tmp_path / f"docs{number}", tmp_path / f"store{number}"
        corpus.mkdir()
        documents = [document_of(str(corpus), f"{n:04}.md", f"Page {n}.") for n in range(number)]
        for document in documents:
            (corpus / document.doc_id).write_text(document.text)
        with Store.open(place, create=True) as store:
            know(store, documents)
        found[number] = [
            asked("sync", corpus, "--store", place, "--model", "/no/such/model", "--json"),
            asked("status", "--store", place),
            asked("status", "--store", place, "--json"),
        ]
    assert found[10] == found[200]
    assert all(statements < 20 for statements, _ in found[10])


def know(store, documents):
    """Have the store know the documents' texts, without any rows, all in one transaction."""
    changes = []
    for number, document in enumerate(documents):
        draft = records.draft(document, np.zeros(0, np.int64), Debt(0, 0), {})
        changes.append(Change(replace(draft, record_id=f"{number:064x}", model="0" * 16), (), None))
    store._manifest.commit(changes, "0" * 16)


class TestBudget:
    def test_what_is_left_is_told_and_comes_first(self, place, lines):
        for name in "abc":
            place.write(f"{name}.md", name * 30)
        place.write("a.md", "a")
        documents, summary = lines("--time-budget", "0s", "--order", "size")
        assert {d: o for d, o in outcomes(documents).items() if o != "unchanged"} == {
            "a.md": "built",
            "b.md": "left",
            "c.md": "left",
        }
        assert (summary["totals"]["left"], summary["states"]["uncached"]) == (2, 2)
        place.write("d.md", "d")
        documents, _ = lines("--time-budget", "0s", "--order", "size")
        assert [line["doc"] for line in documents if line["outcome"] == "built"] == ["b.md"]
        assert lines("--time-budget", "1h")[1]["totals"]["left"] == 0

    def test_then_debt_is_refreshed(self, place, sync, lines):
        place.replace("ferry.md", "30 crowns", "45 crowns")
        place.replace("rules/deck.md", "the bow", "the stern")
        sync("--k", 0, "--verify-sample", 0)
        documents, summary = lines("--refresh-budget", "10m")
        again = [line for line in documents if line["schema"] == "kvfix.refresh/1"]
        assert summary["refresh"]["reprefilled"] == len(again)
        assert summary["states"]["repaired"] == 0
        assert summary["states"]["stale_rows"] == 0
        assert "refresh" in summary["timing_ms"]

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--time-budget", "soon"],
            ["--refresh-budget", "-1"],
            ["--order", "colour"],
            ["--verify-sample", "2"],
            ["--hook", ""],
            ["--hook", "echo 'x"],
            ["--selector", "none"],
            ["--k", "-1"],
        ],
        ids=" ".join,
    )
    def test_what_makes_no_sense(self, kvfix, wrong):
        result = kvfix("sync", "nowhere", *wrong, "--json")
        assert (result.code, result.json["error"]["code"]) in ((2, "usage"), (2, "unknown_selector"))
        assert "nowhere" not in result.json["error"]["message"]


class TestMemory:
    def test_what_takes_more_by_itself_is_done_and_told(self, place, lines, at):
        place.write("new.md", "A new page.")
        documents, summary = lines("--memory", "5kB")
        assert outcomes(documents)["new.md"] == "built"
        assert [line for line in summary["warnings"] if "the largest new.md with 8,448 bytes" in line]
        assert lines("--memory", "1GB")[1]["warnings"] == []
        again = at("build", place.corpus, "--force", "--memory", "5kB")
        assert "warning: new.md takes" in again.err
        assert "warning" not in at("build", place.corpus, "--force").err

    @pytest.mark.parametrize("wrong", ["0", "much", "-1GB"])
    def test_a_size_that_makes_no_sense(self, sync, wrong):
        result = sync("--memory", wrong, "--json")
        assert (result.code, result.json["error"]["code"]) == (2, "usage")
        assert f"--memory {wrong}: expected a size" in result.json["error"]["message"]


class TestHook:
    def script(self, tmp_path, text):
        path = tmp_path / "hook.py"
        path.write_text(f"import sys\n{text}\n")
        return f"{sys.executable} {path}"

    def test_it_is_told_the_names_that_changed(self, place, sync, tmp_path):
        hook = self.script(tmp_path, f"open({str(tmp_path / 'told')!r}, 'w').write(sys.stdin.read())")
        assert sync("--hook", hook).code == 0
        assert not (tmp_path / "told").exists()
        place.write("new $(touch x).md", "A new page.")
        place.write("two\nlines.md", "Another page.")
        place.ferry.rename(place.corpus / "boat.md")
        result = sync("--hook", hook)
        assert result.code == 0
        assert (tmp_path / "told").read_text().splitlines() == ["boat.md", "new $(touch x).md"]
        assert "1 names with line breaks" in result.err
        assert not (tmp_path / "x").exists()

    def test_its_failure_is_a_warning(self, place, lines, tmp_path):
        place.write("new.md", "A new page.")
        hook = self.script(tmp_path, "print('noise'); sys.exit(7)")
        _, summary = lines("--hook", hook)
        assert summary["hook"]["exit_status"] == 7
        assert "exit status 7" in summary["warnings"][0]

    def test_one_that_is_not_there(self, place, sync):
        place.write("new.md", "A new page.")
        result = sync("--hook", "/no/such/command")
        assert result.code == 0
        assert "warning: the hook could not be run" in result.err

    def test_it_may_use_the_store(self, place, sync, tmp_path):
        place.write("new.md", "A new page.")
        code = f"from kvfix.store import Store\nwith Store.open({str(place.store)!r}) as s, s.writing('hook'): pass"
        result = sync("--hook", self.script(tmp_path, code))
        assert "warning" not in result.err


class TestMetrics:
    def test_a_whole_file_under_its_name(self, place, sync, tmp_path):
        place.write("cp1252.md", "caf\xe9".encode("cp1252"))
        place.ferry.unlink()
        target = tmp_path / "kvfix.prom"
        target.write_text("old")
        before = time.time()
        assert sync("--metrics", target).code == 3
        found = dict(line.rsplit(" ", 1) for line in target.read_text().splitlines() if not line.startswith("#"))
        assert found['kvfix_documents{state="exact"}'] == "2"
        assert found['kvfix_documents{state="missing"}'] == "1"
        assert found['kvfix_documents{state="uncached"}'] == "1"
        assert found["kvfix_stale_rows"] == "0"
        assert found["kvfix_sync_failures"] == "1"
        assert before <= float(found["kvfix_sync_last_run_timestamp_seconds"]) <= time.time()
        assert float(found['kvfix_sync_duration_seconds{part="sync"}']) > 0
        assert found['kvfix_sync_documents{outcome="skipped"}'] == "1"
        helped = re.findall(r"^# (?:HELP|TYPE) (\w+)", target.read_text(), re.MULTILINE)
        assert {name.split("{")[0] for name in found} == set(helped)
        mask = os.umask(0)
        os.umask(mask)
        assert target.stat().st_mode & 0o777 == 0o666 & ~mask
        assert [path.name for path in tmp_path.iterdir() if "prom" in path.name] == ["kvfix.prom"]

    def test_one_that_cannot_be_written_is_a_warning(self, sync, tmp_path):
        result = sync("--metrics", tmp_path / "nowhere" / "kvfix.prom")
        assert result.code == 0
        assert "warning: cannot write" in result.err


class TestProcesses:
    def test_a_second_one_says_busy_at_once(self, place, model):
        with Store.open(place.store) as store, store.writing("sync"):
            done = in_process("sync", place.corpus, "--store", place.store, "--lock-timeout", 0, "--json")
        assert done.returncode == 4
        assert done.stdout.count("\n") == 1
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "store_busy"
        assert "kvfix sync" in error["message"]

    def test_one_that_is_ended_goes_on(self, tmp_path, model, kvfix):
        corpus, store = tmp_path / "docs", tmp_path / "store"
        command = ["sync", str(corpus), "--store", str(store), "--model", model]
        done = ended_half_way(command, corpus, store, 40)
        # the record of the one that was being stored may be there without it
        assert 2 <= done < 40
        again = kvfix(*command, "--lock-timeout", 0, "--json")
        assert again.code == 0
        totals = json.loads(again.out.splitlines()[-1])["totals"]
        assert (totals["unchanged"], totals["built"]) == (done, 40 - done)
