"""How much of a sync is work for the model: the repair and probe compute of edited documents beside the whole pass.

    python examples/sync_throughput.py [DIR] [--documents 50] [--rounds 3]

Builds documents of 500 to 1,500 tokens from the handbook with the demo model, once, in DIR; then edits a line of each.
A round computes all the edits with nothing stored (what is counted: select, align, recompute and probes; loading and
diffing are not), then syncs a copy of the store in the same process. One round to warm up is not counted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvfix import Engine, KVFix, Store
from kvfix.corpus import scan
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.edit import compute_change
from kvfix.pipeline.plan import EditOptions, compare
from kvfix.pipeline.sync import SyncOptions

HANDBOOK = Path(__file__).resolve().parents[1] / "corpora" / "handbook"
COMPUTE = ("select", "align", "recompute", "probes")
EDIT = ("30 crowns", "45 crowns")
CHARS = (2000, 6000)


def texts(number: int) -> Iterator[str]:
    """Stretches of the handbook, each with a line of its own a third in."""
    whole = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(HANDBOOK.rglob("*.md")))
    for n in range(number):
        length = CHARS[0] + (CHARS[1] - CHARS[0]) * n // max(1, number - 1)
        start = 1777 * n % (len(whole) - length)
        body = whole[start : start + length]
        third = body.find("\n", length // 3)
        line = f"The fare of line {n} is {EDIT[0]} for a grown person."
        yield f"# Page {n}\n\n{body[:third]}\n\n{line}\n\n{body[third:]}"


def built(place: Path, engine: Engine, number: int) -> Path:
    """The documents as they were, and their store, made where they are not there yet."""
    docs = place / "docs"
    docs.mkdir(parents=True, exist_ok=True)
    for n, text in enumerate(texts(number)):
        (docs / f"{n:03}.md").write_text(text, encoding="utf-8")
    with KVFix(Store.open(place / "store", create=True), lambda: engine) as kv:
        list(kv.build(docs))
    for path in docs.iterdir():
        path.write_text(path.read_text(encoding="utf-8").replace(*EDIT), encoding="utf-8")
    return docs


def compute_s(store: Path, docs: Path, engine: Engine) -> float:
    """Seconds of pure repair and probe compute, one document after the other, nothing stored."""
    spent = 0.0
    with Store.open(store, read_only=True) as opened:
        for document in scan(docs):
            record, clock = opened.head(document.corpus, document.doc_id), Clock()
            change = compare(engine, opened, record, document, clock)
            compute_change(engine, opened, change, EditOptions(verify=False, on_low="escalate"), clock)
            spent += sum(clock.ms.get(step, 0.0) for step in COMPUTE) / 1e3
    return spent


def sync_s(store: Path, docs: Path, engine: Engine) -> float:
    """Seconds of a whole sync over a copy of the store."""
    copy = store.with_name("copy")
    shutil.copytree(store, copy)
    try:
        with KVFix(Store.open(copy), lambda: engine) as kv, kv.store.writing("sync"):
            start = time.perf_counter()
            outcomes = {done.outcome for done in kv.sync(docs, options=SyncOptions(verify_sample=0.0))}
            took = time.perf_counter() - start
        assert outcomes == {"repaired"}, outcomes
        return took
    finally:
        shutil.rmtree(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", nargs="?", type=Path)
    parser.add_argument("--documents", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvfix-") as temporary:
        study(given.place or Path(temporary), given.documents, given.rounds)


def study(place: Path, number: int, rounds: int) -> None:
    """Print a line a round, and the median."""
    engine = Engine.open()
    docs = built(place, engine, number)
    ratios = []
    for n in range(rounds + 1):
        pure, whole = compute_s(place / "store", docs, engine), sync_s(place / "store", docs, engine)
        if n:
            ratios.append(pure / whole)
            print(f"{number} documents: compute {pure:.2f} s, sync {whole:.2f} s, ratio {pure / whole:.3f}")
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
