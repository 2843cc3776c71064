"""What `kvfix edit --no-verify` from a shell takes beside what no command with this model can do without.

    python examples/cold_start.py [--rounds 7]

That is: starting Python and importing torch and transformers, and reading the weights once into memory. Each round
starts a process for each of the three and for an edit of either document - a page of the handbook, and 4,000 tokens of
it -, one after the other. One round to warm up, which also warms the page cache, is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvfix import KVFix
from kvfix.engine.locate import locate

HANDBOOK = Path(__file__).resolve().parents[1] / "corpora" / "handbook"
IMPORTS = "import torch, transformers"
READS = """
import sys, time
start = time.perf_counter()
for path in sys.argv[1:]:
    open(path, "rb").read()
print(time.perf_counter() - start)
"""
PAGE, LONG = "refunds.md", "long.md"
LONG_CHARS = 18_000
FACT = "The refund window is {} days"


def documents(place: Path, days: int) -> None:
    """The two documents, with a fact that changes from round to round."""
    page = (HANDBOOK / "policies" / PAGE).read_text(encoding="utf-8").replace(FACT.format(30), FACT.format(days))
    whole = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(HANDBOOK.rglob("*.md")))
    third = whole.index("\n", LONG_CHARS // 3)
    long = f"{whole[:third]}\n\n{FACT.format(days)}.\n{whole[third:LONG_CHARS]}"
    for name, text in ((PAGE, page), (LONG, long)):
        (place / name).write_text(text, encoding="utf-8")


def imports_s() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - start


def read_s(weights: list[Path]) -> float:
    done = subprocess.run([sys.executable, "-c", READS, *weights], check=True, stdout=subprocess.PIPE)
    return float(done.stdout)


def edit_s(path: Path, store: Path) -> tuple[float, dict]:
    """Wall seconds of the whole command, and its report."""
    command = [sys.executable, "-m", "kvfix", "edit", path, "--no-verify", "--json", "--store", store]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    took = time.perf_counter() - start
    report = json.loads(done.stdout)
    assert report["outcome"] == "repaired", report["reason"]
    return took, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvfix-") as temporary:
        study(Path(temporary), given.rounds)


def study(place: Path, rounds: int) -> None:
    """Print each part's median with its quartiles, and the edits' ratios to what cannot be done without."""
    docs, store = place / "docs", place / "store"
    docs.mkdir()
    documents(docs, 30)
    with KVFix.open(store) as kv:
        tokens = {built.doc_id: built.record.num_tokens for built in kv.build(docs)}
    weights = sorted(locate(None)[1].glob("*.safetensors"))
    seconds: dict[str, list[float]] = {}
    for n in range(rounds + 1):
        documents(docs, 31 + n)
        took = {"import torch, transformers": imports_s(), "read the weights": read_s(weights)}
        floor = sum(took.values())
        for name in (PAGE, LONG):
            label = f"kvfix edit, {tokens[name]:,} tokens"
            took[label], report = edit_s(docs / name, store)
            took[f"{label}: of it, repair"] = report["timing_ms"]["total"] / 1e3
            took[f"{label}: ratio"] = took[label] / floor
        for label, value in took.items() if n else ():
            seconds.setdefault(label, []).append(value)
    for label, values in seconds.items():
        low, median, high = statistics.quantiles(values, n=4)
        unit = "" if label.endswith("ratio") else " s"
        print(f"{label:<40} {median:.2f}{unit}  ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
