"""How much of a sync is work for the model, and what it gains where repairs share passes.

    python examples/sync_throughput.py [DIR] [--documents 50] [--rounds 3]

Builds documents of 500 to 1,500 tokens from the handbook with the demo model, once, in DIR; then edits a line of each.
A round computes all the edits one by one with nothing stored (what is counted: select, align, recompute and probes;
loading and diffing are not), then syncs two copies of the store in the same process, durable commits and all: one
document after another, and in passes that several share. One round to warm up is not counted.
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
from kvfix.core import Document, KVCache
from kvfix.corpus import scan
from kvfix.engine.gate import deviation
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.edit import compute_change
from kvfix.pipeline.load import load_cache
from kvfix.pipeline.packs import REPAIR_ROWS
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


def sync_s(store: Path, docs: Path, engine: Engine, pack_rows: int) -> float:
    """Seconds of a whole sync over a copy of the store, which is left there."""
    copy = copy_of(store, pack_rows)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    with KVFix(Store.open(copy), lambda: engine) as kv, kv.store.writing("sync"):
        start = time.perf_counter()
        options = SyncOptions(verify_sample=0.0, pack_rows=pack_rows)
        outcomes = {done.outcome for done in kv.sync(docs, options=options)}
        took = time.perf_counter() - start
    assert outcomes <= {"repaired", "reprefilled"}, outcomes
    return took


def copy_of(store: Path, pack_rows: int) -> Path:
    return store.with_name(f"synced-{pack_rows}")


def apart(store: Path, docs: Path, engine: Engine) -> float:
    """How far the caches of the two syncs lie apart, relative to the larger of 1 and a layer's largest entry."""
    with Store.open(copy_of(store, 1)) as single, Store.open(copy_of(store, REPAIR_ROWS)) as packed:
        pairs = ([loaded(engine, opened, document) for opened in (single, packed)] for document in scan(docs))
        return max(deviation(*pair) for pair in pairs)


def loaded(engine: Engine, store: Store, document: Document) -> KVCache:
    """A document's cache as it is stored."""
    return load_cache(engine, store.snapshot(store.head(document.corpus, document.doc_id)))


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
    store, docs = place / "store", built(place, engine, number)
    shares, gains = [], []
    for n in range(rounds + 1):
        pure = compute_s(store, docs, engine)
        single, packed = (sync_s(store, docs, engine, rows) for rows in (1, REPAIR_ROWS))
        if not n:
            print(f"caches of the two syncs differ by {apart(store, docs, engine):.1e} at most")
            continue
        shares.append(pure / single)
        gains.append(single / packed)
        print(
            f"{number} documents: compute {pure:.2f} s, sync one by one {single:.2f} s ({shares[-1]:.3f} compute), "
            f"packed {packed:.2f} s ({gains[-1]:.2f} times as fast)"
        )
    for rows in (1, REPAIR_ROWS):
        shutil.rmtree(copy_of(store, rows))
    print(f"medians: {statistics.median(shares):.3f} compute, packed {statistics.median(gains):.2f} times as fast")


if __name__ == "__main__":
    main()
