"""The README's example and the scripts in examples/ run as they stand, here on a tiny model."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import pytest

from kvfix import Engine, KVFix
from kvfix.cli.app import main
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


def test_the_handbook_study_runs(model, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("handbook_study", ROOT / "examples" / "handbook_study.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
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
