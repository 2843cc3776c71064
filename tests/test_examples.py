"""The README's example and the scripts in examples/ run as they stand, here on a tiny model."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType

import pytest

from kvfix import Engine, KVFix
from kvfix.cli.app import main
from kvfix.config import Settings, load_settings
from kvfix.ops.backend import interpreted
from tests.tolerances import CACHE
from tests.zoo import save_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_model(tmp_path_factory.mktemp("examples") / "llama", "llama", max_position_embeddings=8192))


def test_the_readme_example_runs(model, tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    shutil.copytree(ROOT / "corpora" / "handbook", tmp_path / "corpora" / "handbook")
    monkeypatch.chdir(tmp_path)
    opened = KVFix.open
    monkeypatch.setattr(KVFix, "open", lambda store: opened(store, model))
    text = Path("corpora/handbook/policies/refunds.md").read_text(encoding="utf-8")
    exec(code, {"new_text": text.replace("30 days", "45 days", 1)})
    assert re.match(r"re\w+ed ", capsys.readouterr().out)


def example(name: str) -> ModuleType:
    """A script in examples/, not run yet."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_handbook_study_runs(model, tmp_path, monkeypatch, capsys):
    study = example("handbook_study")
    engine = Engine.open(model)
    monkeypatch.setattr(study.Engine, "open", lambda: engine)
    monkeypatch.setattr(study, "PLACE", tmp_path)
    study.study(study.EditOptions(k=8, strategy="repair"), "refunds-")
    shown = capsys.readouterr().out
    reports = study.lines(tmp_path / "reports.jsonl")
    assert {report["outcome"] for report in reports} == {"repaired"}
    assert all(report["version"] == 2 for report in reports)
    assert "median MR" in shown
    assert "bytes written / bytes changed" in shown


def test_the_debt_study_runs(model, tmp_path, monkeypatch, capsys):
    study = example("debt_study")
    engine = Engine.open(model)
    monkeypatch.setattr(study.Engine, "open", lambda: engine)
    monkeypatch.setattr(study, "PLACE", tmp_path)
    monkeypatch.setattr(study, "ARMS", {"repaired": None, "refreshed": 3})
    options = study.EditOptions(k=8, strategy="repair", verify=False, auto_probes=False)
    records = [asdict(found) for found in study.study("policies/purchasing.md", options, 4, seed=0)]
    assert [(r["arm"], r["edits_behind"]) for r in records if r["arm"] != "never repaired"] == [
        ("repaired", 1), ("refreshed", 1), ("repaired", 2), ("refreshed", 2),
        ("repaired", 3), ("refreshed", 0), ("repaired", 4), ("refreshed", 1),
    ]  # fmt: skip
    at_3 = {r["arm"]: r["kl_facts"] for r in records if r["step"] == 3}
    assert at_3["refreshed"] < 1e-5 < at_3["repaired"] < at_3["never repaired"]
    study.table(records)
    assert "kl_neutral" in capsys.readouterr().out


def test_the_studies_of_shared_passes_run(model, tmp_path, monkeypatch, capsys):
    throughput, sizes = example("sync_throughput"), example("pack_sizes")
    engine = Engine.open(model)
    monkeypatch.setattr(throughput.Engine, "open", lambda *given: engine)
    throughput.study(tmp_path, 4, 1)
    shown = capsys.readouterr().out
    apart, packed = re.search(r"differ by (\S+) at most\n4 documents: .* packed (\S+) s", shown).groups()
    assert float(apart) <= CACHE
    assert float(packed) > 0
    sizes.main(["--tokens", "40", "--k", "4", "--documents", "1,3", "--rounds", "1", "--cpu"])
    assert "3 documents (  18 rows)" in capsys.readouterr().out


def test_the_gpu_check_runs_without_a_gpu(monkeypatch, capsys, tmp_path):
    """As small as can be, kernels interpreted: every comparison and every figure is there."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    check = importlib.import_module("gpu_check")
    if not interpreted():
        pytest.skip("with a GPU the script itself is the test")
    assert check.main(["--tiny", "--out", str(tmp_path / "figures")]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["equal"]
    assert json.loads((tmp_path / "figures.json").read_text()) == report
    told = (tmp_path / "figures.txt").read_text().splitlines()
    assert told[0].startswith("cpu")
    assert all(line in err for line in told[1:])
    assert len(report["checks"]) >= 20
    assert all(entry["ok"] and entry["error"] <= entry["allowed"] for entry in report["checks"])
    assert report["figures"]["ops"]["positional_attention"][0]["chosen"]
    (repair,) = report["figures"]["repairs"]
    assert repair["recomputed"] == 7
    assert repair["speedup_full"]["median"] > 0
    assert 0 < repair["roofline"]["recompute"]["share"] < 1
    packed = report["figures"]["packed"]
    assert [row["documents"] for row in packed] == [1, 2]
    for row in packed:
        assert row["eager"]["weight_bytes"] == row["replayed"]["weight_bytes"] > 0
        assert min(row[way][name] for way in ("eager", "replayed") for name in ("share", "ms_per_document")) > 0
    assert packed[1]["eager"]["kv_read_bytes"] == 2 * packed[0]["eager"]["kv_read_bytes"]
    assert "(chosen)" in err
    assert "tiny" in err


def test_the_gpu_check_times_nothing_that_is_not_equal(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    check, equality = importlib.import_module("gpu_check"), importlib.import_module("gpu_equality")

    def one_fails(scale, found):
        found.compare("a kernel", 1e-6, lambda: float("nan"))
        found.compare("another", 1e-6, lambda: 0.0)

    monkeypatch.setattr(equality, "check_ops", one_fails)
    monkeypatch.setattr(equality, "check_passes", lambda scale, found: None)
    assert check.main(["--tiny"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["equal"], report["figures"]) == (False, {})
    assert "not equal, and what depends on it not timed: a kernel" in err
    assert (
        list(check.table({"repairs": [{"model": "m", "context": 40, "equal": False}], "packed": [{"equal": False}]}))
        == []
    )


def scheduled() -> list[str]:
    """Every kvfix command of the crontab lines, the prose around them and the systemd unit."""
    text = "\n".join(
        (ROOT / path).read_text(encoding="utf-8")
        for path in ("README.md", "examples/cron.md", "examples/systemd/kvfix-sync.service")
    )
    return re.findall(r"kvfix ((?:sync|refresh) .*--store .*)", text)


@pytest.mark.parametrize("command", scheduled())
def test_scheduled_commands_are_understood(command, tmp_path, capfd):
    """As they stand, but for where things lie: a store that is not there yet, and no time to lose."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("")
    words = shlex.split(
        command.replace("/srv/", f"{tmp_path}/").replace("/var/lib/node_exporter/textfile", str(tmp_path))
    )
    code = main([*words, "--dry-run"])
    err = capfd.readouterr().err
    if words[0] == "sync":
        assert code == 0, err
    else:
        assert (code, "There is no store at" in err) == (2, True)


def test_there_are_scheduled_commands():
    assert len(scheduled()) >= 5


def test_the_daemons_unit_is_understood(tmp_path, capfd):
    """As it stands, but that it only asks whether there is one."""
    unit = (ROOT / "examples" / "systemd" / "kvfix-serve.service").read_text(encoding="utf-8")
    words = shlex.split(
        re.search(r"^ExecStart=\S*/kvfix (serve .*)$", unit, re.MULTILINE)[1].replace("%t", str(tmp_path))
    )
    code = main([*words, "--status"])
    assert (code, f"no daemon at {tmp_path}/kvfix/serve.sock" in capfd.readouterr().err) == (2, True)


def documented() -> dict[str, str]:
    """The keys of examples/kvfix.toml and whether each line is a default ('') or commented out ('#')."""
    text = (ROOT / "examples" / "kvfix.toml").read_text(encoding="utf-8")
    return {name: mark for mark, name in re.findall(r"^(#?) ?([a-z_]+) = ", text, re.MULTILINE)}


def test_every_setting_is_documented_with_its_default():
    found = documented()
    assert set(found) == {setting.name for setting in fields(Settings)}
    defaults = {setting.name: setting.default for setting in fields(Settings)}
    assert {name for name, mark in found.items() if mark} == {name for name in found if defaults[name] is None}
    settings = load_settings(config_file=ROOT / "examples" / "kvfix.toml", environ={})
    for name, default in defaults.items():
        value = getattr(settings, name)
        assert value == (str(ROOT / "examples" / "cache_store") if name == "store" else default), name


def test_what_is_commented_out_is_understood_too(tmp_path):
    text = (ROOT / "examples" / "kvfix.toml").read_text(encoding="utf-8")
    (tmp_path / "kvfix.toml").write_text(re.sub(r"^# ([a-z_]+ = )", r"\1", text, flags=re.MULTILINE))
    settings = load_settings(start=tmp_path, environ={})
    assert None not in [getattr(settings, setting.name) for setting in fields(Settings)]


@pytest.fixture
def repository(tmp_path, model):
    """A git repository with one document and its store, and the environment that hooks are run in."""
    command = tmp_path / "kvfix"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kvfix.cli.app import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    command.chmod(0o755)
    place = tmp_path / "repository"
    (place / "docs").mkdir(parents=True)
    (place / "docs" / "a.md").write_text("The fare is 30 crowns.")
    (place / "kvfix.toml").write_text(f"store = {str(tmp_path / 'store')!r}\nmodel = {model!r}\n")
    told = {"KVFIX": str(command), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    told |= {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def call(*words):
        return subprocess.run(words, cwd=place, env={**os.environ, **told}, capture_output=True, text=True, check=False)

    assert call("git", "init", "-q").returncode == 0
    assert main(["sync", str(place / "docs"), "--quiet"]) == 0
    return place, call


def test_the_ci_hook_tells_what_is_behind(repository):
    place, call = repository
    check = ("sh", str(ROOT / "examples" / "hooks" / "ci"), "docs")
    assert call(*check).returncode == 0
    (place / "docs" / "a.md").write_text("The fare is 45 crowns.")
    (place / "docs" / "b.md").write_text("New.")
    behind = call(*check)
    assert (behind.returncode, behind.stdout) == (1, "")
    assert behind.stderr.splitlines()[1:] == ['  "a.md"', '  "b.md"']
    assert call(*check[:-1], "nowhere").returncode == 2


def test_the_post_commit_hook_repairs_in_the_background(repository):
    place, call = repository
    shutil.copy(ROOT / "examples" / "hooks" / "post-commit", place / ".git" / "hooks" / "post-commit")
    (place / "other.txt").write_text("not a document's directory")
    call("git", "add", "other.txt")
    assert call("git", "commit", "-qm", "other").returncode == 0
    log = place / ".git" / "kvfix.log"
    assert not log.exists()
    (place / "docs" / "a.md").write_text("The fare is 45 crowns.")
    call("git", "add", "docs")
    done = call("git", "commit", "-qm", "edit")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    until = time.monotonic() + 120
    while not (log.exists() and '"end"' in log.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["doc"] for line in lines if line["event"] == "document"] == ["a.md"]
    assert lines[-1]["event"] == "end"
