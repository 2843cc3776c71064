"""What `kvfix edit --no-verify` takes from a shell: cold, beside what no command can do without, and served.

    python examples/cold_start.py [--rounds 7]

What none can do without: starting Python and importing torch and transformers, and reading the weights once into
memory. Each round starts a process for each of the three and for an edit of either document - a page of the handbook,
and 5,000 tokens of it -, one after the other, and has the same edits made by a `kvfix serve` that runs beside: their
wall time stands beside the repair and its probes. One round to warm up (the page cache too) is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def edit_s(path: Path, store: Path, **variables: str) -> tuple[float, dict]:
    """Wall seconds of the whole command, and its report."""
    command = [sys.executable, "-m", "kvfix", "edit", path, "--no-verify", "--json", "--store", store]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **variables})
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


def build(place: Path, name: str) -> tuple[Path, Path, dict[str, int]]:
    """A folder of both documents, a store of them, and how many tokens they have."""
    docs, store = place / name, place / f"{name}-store"
    docs.mkdir()
    documents(docs, 30)
    with KVFix.open(store) as kv:
        return docs, store, {built.doc_id: built.record.num_tokens for built in kv.build(docs)}


@contextmanager
def daemon(socket: Path) -> Iterator[None]:
    """`kvfix serve`, until it is left."""
    command = [sys.executable, "-m", "kvfix", "serve", "--socket", socket, "--quiet"]
    with subprocess.Popen(command) as process:
        while not socket.exists():
            time.sleep(0.05)
        try:
            yield
        finally:
            process.terminate()


def study(place: Path, rounds: int) -> None:
    """Print each part's median with its quartiles, and the ratios."""
    docs, store, tokens = build(place, "cold")
    warm_docs, warm_store, _ = build(place, "warm")
    weights = sorted(locate(None)[1].glob("*.safetensors"))
    seconds: dict[str, list[float]] = {}
    with daemon(place / "socket"):
        for n in range(rounds + 1):
            documents(docs, 31 + n)
            documents(warm_docs, 31 + n)
            took = {"import torch, transformers": imports_s(), "read the weights": read_s(weights)}
            floor = sum(took.values())
            for name in (PAGE, LONG):
                label = f"kvfix edit, {tokens[name]:,} tokens"
                took[label], report = edit_s(docs / name, store)
                took[f"{label}: of it, repair"] = report["timing_ms"]["total"] / 1e3
                took[f"{label}: ratio"] = took[label] / floor
            for name in (PAGE, LONG):
                label = f"through serve, {tokens[name]:,} tokens"
                took[label], report = edit_s(warm_docs / name, warm_store, KVFIX_SERVE=str(place / "socket"))
                ms = report["timing_ms"]
                took[f"{label}: of it, repair"] = ms["total"] / 1e3
                took[f"{label}: of it, probes"] = ms["probes"] / 1e3
                took[f"{label}: ratio to both"] = took[label] * 1e3 / (ms["total"] + ms["probes"])
            for label, value in took.items() if n else ():
                seconds.setdefault(label, []).append(value)
    for label, values in seconds.items():
        low, median, high = statistics.quantiles(values, n=4)
        unit = "" if "ratio" in label else " s"
        print(f"{label:<44} {median:.3f}{unit}  ({low:.3f}-{high:.3f})")


if __name__ == "__main__":
    main()
