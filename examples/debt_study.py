"""What becomes of a cache over twenty edits of its document: repaired alone, refreshed now and then, left as it was.

Every edit replaces a number at random; every fourth one puts in or takes out a sentence instead, so that rows move.
After each, all facts edited so far and a neutral question are put to every cache, and its next-token distributions
compared with a fresh prefill's. One line a step and arm goes to `.cache/debt/records.jsonl`. About 10 minutes on two
cores.

    python examples/debt_study.py [--selector linked] [--k 32] [--docs policies/purchasing.md ...]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from kvfix import EditOptions, Engine, KVFix, Store, metrics
from kvfix.bench.replay_edit import neutral_probe
from kvfix.core import KVCache
from kvfix.pipeline.arms import MAX_NEW, ask_arm
from kvfix.pipeline.quality import room_for
from kvfix.probes import Probe, auto_probes

HANDBOOK = Path(__file__).resolve().parents[1] / "corpora" / "handbook"
PLACE = HANDBOOK.parents[1] / ".cache" / "debt"
DOCS = ("policies/purchasing.md", "runbooks/snow-clearing.md")
NUMBER = re.compile(r"(?<![\w.,:])[1-9]\d(?![\w.,:%]*\d)")
SENTENCE = "Anyone who is unsure asks the duty desk before going on. "
# arm → it is refreshed when the worst row is so many edits behind; None: never
ARMS = {"repaired": None, "refreshed at 10": 10, "refreshed at 5": 5}


@dataclass(frozen=True)
class Measured:
    """One arm after one edit; divergences in nats a token."""

    doc: str
    step: int
    arm: str
    stale_rows: int | None
    edits_behind: int | None
    kl_newest: float | None  # the fact just edited
    kl_facts: float  # mean over all facts edited so far
    kl_neutral: float
    prefers_new: float | None  # share of the facts that the fresh cache has right


def texts(text: str, num_edits: int, seed: int) -> Iterator[str]:
    """The document after each edit."""
    rng = random.Random(seed)
    edited: set[int] = set()  # numbers, counted from the beginning: none is replaced twice
    for step in range(1, num_edits + 1):
        if step % 4 == 0 and SENTENCE in text:
            text = text.replace(SENTENCE, "")
        elif step % 4 == 0:
            at = rng.choice([match.end() for match in re.finditer(r"[a-z]\. (?=[A-Z])", text)])
            text = text[:at] + SENTENCE + text[at:]
        else:
            found = list(NUMBER.finditer(text))
            number = rng.choice([n for n in range(len(found)) if n not in edited])
            edited.add(number)
            old = found[number]
            new = rng.choice([n for n in range(11, 99) if str(n) != old[0]])
            text = f"{text[: old.start()]}{new}{text[old.end() :]}"
        yield text


def facts_of(kv: KVFix, doc: str, text: str) -> list[Probe]:
    """The automatic probes of an edit that replaced text."""
    change, encode = kv.diff(doc, text), kv.engine.text.plain_ids
    old, new = change.old, change.new
    sides = (new.token_ids, old.token_ids, text, new.offsets, change.snapshot.text, old.offsets)
    return [p for p in auto_probes(change.diff, *sides, encode, new.num_prefix) if p.old_ids and p.new_ids]


def divergences(engine: Engine, caches: dict[str, KVCache], fresh: KVCache, facts: list[Probe]) -> dict[str, list]:
    """For each cache the divergence from the fresh one at every fact and at the neutral question, and its margins."""
    neutral = neutral_probe(engine)
    (ids,) = engine.generate(fresh, [list(neutral.query_ids)], MAX_NEW)
    asked = [*facts, replace(neutral, new_ids=tuple(ids))]
    # a few at a time: only so many distributions are kept
    groups = [asked[n : n + 8] for n in range(0, len(asked), 8)]
    arms = {
        name: [ask_arm(engine, cache, group, oracle=True) for group in groups]
        for name, cache in (*caches.items(), ("fresh", fresh))
    }
    flat = {
        name: [pair for arm in found for pair in zip(arm.logprobs, arm.margins, strict=True)]
        for name, found in arms.items()
    }
    return {
        name: [
            (None if a is None or b is None else metrics.kl_mean(a, b), margin, margin_fresh)
            for (a, margin_fresh), (b, margin) in zip(flat["fresh"], flat[name], strict=True)
        ]
        for name in caches
    }


def study(doc: str, options: EditOptions, num_edits: int, seed: int) -> Iterator[Measured]:
    engine = Engine.open()
    shutil.rmtree(PLACE / "work", ignore_errors=True)
    file = PLACE / "work" / "corpus" / doc
    file.parent.mkdir(parents=True)
    first = (HANDBOOK / doc).read_text(encoding="utf-8")
    file.write_text(first, encoding="utf-8")
    desks = {arm: KVFix(Store.open(PLACE / "work" / arm, create=True), lambda: engine) for arm in ARMS}
    for kv in desks.values():
        list(kv.build(PLACE / "work" / "corpus"))
    desk = desks["repaired"]
    untouched = desk.load(file)
    facts: list[Probe] = []
    for step, text in enumerate(texts(first, num_edits, seed), 1):
        newest = facts_of(desk, str(file), text)
        facts += newest
        file.write_text(text, encoding="utf-8")
        for arm, kv in desks.items():
            kv.repair(file, options)
            if ARMS[arm] is not None and kv.record(file).edits_behind >= ARMS[arm]:
                list(kv.refresh())
        room = room_for([*facts, neutral_probe(engine)]) + MAX_NEW
        fresh = engine.prefill(engine.encode(text).token_ids, room=room)
        caches = {arm: kv.load(file, room) for arm, kv in desks.items()} | {"never repaired": untouched}
        for arm, found in divergences(engine, caches, fresh, facts).items():
            yield summed(doc, step, arm, found, len(newest), desks.get(arm), file)
    for kv in desks.values():
        kv.close()


def summed(doc: str, step: int, arm: str, found: list, num_newest: int, kv: KVFix | None, file: Path) -> Measured:
    record = kv.record(file) if kv else None
    *facts, (neutral, _, _) = found
    known = [kl for kl, _, _ in facts if kl is not None]
    right = [margin > 0 for _, margin, fresh in facts if fresh > 0]
    return Measured(
        doc,
        step,
        arm,
        record.stale_rows if record else None,
        record.edits_behind if record else None,
        facts[-1][0] if num_newest else None,
        fmean(known),
        neutral,
        fmean(right) if right else None,
    )


def table(records: list[dict]) -> None:
    """Means over the documents, a few steps at a time."""
    arms = [*ARMS, "never repaired"]
    for figure in ("kl_facts", "kl_neutral", "prefers_new"):
        print(f"\n{figure:14}" + "".join(f"{arm:>18}" for arm in arms))
        last = max(r["step"] for r in records)
        for low in range(1, last + 1, 4):
            rows = [r for r in records if low <= r["step"] < low + 4 and r[figure] is not None]
            means = [fmean(r[figure] for r in rows if r["arm"] == arm) for arm in arms]
            print(f"{f'edits {low}-{low + 3}':14}" + "".join(f"{mean:18.4f}" for mean in means))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selector", default=EditOptions().selector)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--docs", nargs="+", default=DOCS)
    parser.add_argument("--edits", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    options = EditOptions(given.selector, given.k, strategy="repair", verify=False, auto_probes=False)
    records: list[dict] = []
    with (PLACE / "records.jsonl").open("w", encoding="utf-8") as out:
        for doc in given.docs:
            for measured in study(doc, options, given.edits, given.seed):
                records.append(asdict(measured))
                out.write(json.dumps(records[-1]) + "\n")
                out.flush()
    table(records)
