"""The demonstration behind `make demo`: build the handbook, change one document, repair its cache, ask both.

Works on a copy of the handbook, with a store of its own, both below `.cache/demo`; can be repeated.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from kvfix.cli.app import main

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".cache" / "demo"
EDIT = "refunds-window"


def run(*arguments: str) -> None:
    """Show a command as it would be typed, and run it; stop where it fails."""
    print(f"\n$ kvfix {shlex.join(arguments)}", file=sys.stderr, flush=True)
    code = main(arguments)
    if code:
        sys.exit(code)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def demo() -> None:
    edit = next(e for e in lines(ROOT / "corpora" / "handbook_edits.jsonl") if e["id"] == EDIT)
    probes = [p for p in lines(ROOT / "corpora" / "handbook" / "probes.jsonl") if p["edit"] == EDIT]
    handbook, store = PLACE / "handbook", PLACE / "store"
    shutil.copytree(ROOT / "corpora" / "handbook", handbook, dirs_exist_ok=True)
    document = handbook / edit["doc"]

    run("build", str(handbook), "--store", str(store))

    text = document.read_text(encoding="utf-8")
    for change in edit["replacements"]:
        text = text.replace(change["find"], change["replace"])
    document.write_text(text, encoding="utf-8")
    print(f"\n{edit['doc']} is edited: {edit['note']}", file=sys.stderr)

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(probe) + "\n" for probe in probes)
        file.flush()
        run("edit", str(document), "--store", str(store), "--selector", "editlocal", "--k", "32", "--probes", file.name)
    run("ask", probes[0]["question"], "--doc", str(document), "--store", str(store), "--compare", "--max-new", "16")


if __name__ == "__main__":
    demo()
