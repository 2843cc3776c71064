"""Make a git repository of the handbook and its scripted past, for `kvfix bench replay` to replay.

    python examples/handbook_history.py DIR

Each line of `corpora/handbook_history.jsonl` becomes a commit; a few commits more bring in what a replay has to pass
over: a binary file, a huge one and one that is not UTF-8. The repository is the same, to the commit's id, wherever it
is made. Needs git and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

CORPORA = Path(__file__).resolve().parents[1] / "corpora"
START = datetime(2025, 1, 6, 9, tzinfo=timezone.utc)
HUGE_LINES = 60_000

# neither version can be replayed, each for a reason of its own
ODDITIES = {
    "archive/scan-1908.txt": (b"\x89slate\0\1\2\3\n", b"\x89slate\0\1\2\3\4\n"),
    "archive/letters-1986.txt": ("Schöne Grüße\n".encode("latin-1"), "Schöne Grüße und Schnee\n".encode("latin-1")),
    "archive/wind-log.txt": (b"Tarn mast: 34 km/h\n" * HUGE_LINES, b"Tarn mast: 35 km/h\n" * HUGE_LINES),
}
WHO = {"NAME": "Ines Corrigan", "EMAIL": "ines@bmr.example"}


def edits() -> list[dict]:
    """The scripted past, in order."""
    lines = (CORPORA / "handbook_history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def applied(edit: dict, text: str) -> str:
    """The text after an edit, whose `find`s are replaced one after another."""
    for change in edit["replacements"]:
        text = text.replace(change["find"], change["replace"])
    return text


class Repository:
    """A new git repository; commits are a day apart."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and any(folder.iterdir()):
            sys.exit(f"{folder} is not empty")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.num_commits = folder, 0
        self.git("init", "--quiet", "--template=", "--initial-branch=main")

    def git(self, *arguments: str) -> None:
        """Run git without anybody's settings."""
        date = (START + timedelta(days=self.num_commits)).isoformat()
        who = {f"GIT_{role}_{part}": value for role in ("AUTHOR", "COMMITTER") for part, value in WHO.items()}
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        command = ["git", "-C", str(self.folder), "-c", "core.autocrlf=false", *arguments]
        subprocess.run(command, check=True, env={**own, **settings, **who, **dates})

    def commit(self, message: str) -> None:
        """Record everything as it stands."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        self.num_commits += 1

    def write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def apply(self, edit: dict) -> None:
        """Commit one edit, with its document's new name where it gets one."""
        before = edit.get("from", edit["doc"])
        text = (self.folder / before).read_bytes().decode("utf-8")
        (self.folder / before).unlink()
        self.write(edit["doc"], applied(edit, text).encode("utf-8"))
        self.commit(edit["message"])


def make(folder: Path) -> None:
    """The handbook as it stands in `corpora/`, then its past."""
    repository = Repository(folder)
    for path in sorted((CORPORA / "handbook").rglob("*.md")):
        repository.write(path.relative_to(CORPORA / "handbook").as_posix(), path.read_bytes())
    repository.commit("Take the handbook under version control")
    for commit in _odd_commits(repository, 0):
        repository.commit(commit)
    branch = None
    for number, edit in enumerate(edits()):
        wanted = edit.get("branch")
        if wanted and wanted != branch:
            repository.git("checkout", "--quiet", "-b", wanted)
        elif branch and not wanted:
            repository.git("checkout", "--quiet", "main")
        repository.apply(edit)
        if branch and not wanted:
            repository.git("merge", "--quiet", "--no-ff", "--no-edit", "--message", f"Merge branch {branch}", branch)
            repository.num_commits += 1
        branch = wanted
        if number == 40:
            for commit in _odd_commits(repository, 1):
                repository.commit(commit)


def _odd_commits(repository: Repository, version: int) -> Iterator[str]:
    """Write one file of the archive after another; its commit's message."""
    for name, contents in ODDITIES.items():
        repository.write(name, contents[version])
        yield f"{('Add', 'Correct')[version]} {name}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    make(parser.parse_args().folder)
