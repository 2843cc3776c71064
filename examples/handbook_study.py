"""Repair every scripted edit of the handbook with the demo model, and say what the repairs were worth.

Writes one `kvfix.edit/1` report a line to `.cache/study/reports.jsonl`. About 20 minutes on two cores.

    python examples/handbook_study.py [--selector linked] [--k 32] [--strategy repair]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

from kvfix import EditOptions, Engine, KVFix, Store
from kvfix.probes import GivenProbe

CORPORA = Path(__file__).resolve().parents[1] / "corpora"
PLACE = CORPORA.parent / ".cache" / "study"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def link_or_copy(source: str, target: str) -> None:
    """Segments never change, so a scratch store may share them; everything else is its own."""
    os.link(source, target) if source.endswith(".safetensors") else shutil.copy2(source, target)


def study(options: EditOptions, only: str) -> None:
    engine = Engine.open()
    base, scratch = PLACE / "store", PLACE / "scratch"
    with KVFix(Store.open(base, create=True), lambda: engine) as kv:
        for built in kv.build(CORPORA / "handbook"):
            print(f"{built.doc_id}: {built.outcome}", flush=True)
    probes = lines(CORPORA / "handbook" / "probes.jsonl")
    with (PLACE / "reports.jsonl").open("w", encoding="utf-8") as out:
        for edit in lines(CORPORA / "handbook_edits.jsonl"):
            mine = [p for p in probes if p["edit"] == edit["id"]]
            if only not in edit["id"] and only not in {p["kind"] for p in mine}:
                continue
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(base, scratch, copy_function=link_or_copy)
            with KVFix(Store.open(scratch), lambda: engine) as kv:
                report = repair(kv, edit, mine, options)
            out.write(json.dumps(report) + "\n")
            out.flush()
            show(edit, report)
    summarise(lines(PLACE / "reports.jsonl"), {(p["doc"], p["question"]): p for p in probes})


def repair(kv: KVFix, edit: dict, probes: list[dict], options: EditOptions) -> dict:
    text = (CORPORA / "handbook" / edit["doc"]).read_text(encoding="utf-8")
    for change in edit["replacements"]:
        text = text.replace(change["find"], change["replace"])
    given = tuple(GivenProbe(p["question"], p["old"], p["new"], p["doc"]) for p in probes)
    document = CORPORA / "handbook" / edit["doc"]
    return kv.repair(document, replace(options, probes=given), text).to_json()


def show(edit: dict, report: dict) -> None:
    quality, tokens = report["quality"], report["tokens"]
    figure = "  -  " if quality["mr_median"] is None else f"{quality['mr_median']:5.2f}"
    print(
        f"{edit['id']:26} {edit['kind']:16} {report['outcome']:11} {len(report['spans'])} spans "
        f"{tokens['recomputed']:4} of {tokens['new']:4} rows  MR {figure}  "
        f"{quality['num_kept']} of {quality['num_probes']} probes kept  {'; '.join(report['warnings'])}",
        flush=True,
    )


def summarise(reports: list[dict], given: dict[tuple[str, str], dict]) -> None:
    """MR over the probes that the fresh cache answers rightly, and flips among those that flip there."""
    kept: dict[str, list[dict]] = {"all": []}
    for report in reports:
        for probe in report["quality"]["probes"]:
            if probe["counts"] and probe["margin_fresh"] > 0:
                said = given.get((report["doc"], probe["question"]), {})
                kind = (
                    "automatic"
                    if probe["kind"] == "auto"
                    else f"given, {said.get('kind')} {said.get('distance') or ''}"
                )
                kept.setdefault(kind.strip(), []).append(probe)
                kept["all"].append(probe)
    print(f"\n{'probes':26} {'kept':>5} {'median MR':>10} {'mean MR':>8} {'flips':>12} {'prefers new':>12}")
    for kind, found in kept.items():
        mr = [p["mr"] for p in found if p["mr"] is not None]
        flips = [p["flip"] for p in found if p["flip_fresh"]]
        print(
            f"{kind:26} {len(found):5} {statistics.median(mr):10.3f} {statistics.fmean(mr):8.3f} "
            f"{sum(map(bool, flips)):5} of {len(flips):3} {sum(p['prefers_new'] for p in found):5} of {len(found):3}"
        )
    speedups = [r["speedup"]["compute_vs_full"] for r in reports if r["speedup"]["compute_vs_full"]]
    ratios = [r["bytes"]["written_bytes"] / r["bytes"]["changed_bytes"] for r in reports if r["bytes"]["changed_bytes"]]
    print(f"\nmedian compute speed-up over a full prefill {statistics.median(speedups):.1f}")
    print(f"bytes written / bytes changed: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--selector", default="editlocal")
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--only", default="", help="edits whose id contains this, or that have probes of this kind")
    given = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    study(EditOptions(given.selector, given.k, strategy=given.strategy), given.only)
