"""What `gpu_check.py` times of repairs: against prefills, packed, recorded; each with its share of the roofline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_equality import (
    Findings,
    allowed_by_noise,
    caches_apart,
    copy_of,
    edited,
    plain_prefill,
    random_engine,
    recompute_error,
)
from gpu_graphs import Jobs, recorded_error, recording
from gpu_scales import Scale
from gpu_times import timed_ms

from kvfix.bench.roofline import Roofline
from kvfix.core import KVCache, RepairPlan, RowMap, TokenDiff
from kvfix.engine import Engine
from kvfix.pipeline.measure import Arms, compare_arms


def time_repairs(scale: Scale, found: Findings, in_time: Callable[[str], bool], graphs: bool) -> None:
    """Random models of well-known shapes; `graphs`: recorded passes too."""
    found.figures |= {"ceilings": {}, "repairs": [], "packed": []}
    for name, (kind, sizes) in scale.models.items():
        if not in_time(name):
            continue
        engine = random_engine(scale, kind, sizes, scale.dtype)
        roofline = Roofline(engine)
        found.figures["ceilings"][name] = roofline.describe()
        for context in scale.contexts:
            label = f"{name} at {context}"
            if in_time(label):
                Timed(scale, found, engine, roofline, name, context).all(in_time, graphs)
        del engine, roofline
        if scale.device == "cuda":
            torch.cuda.empty_cache()


class Timed:
    """One model at one length: a text with a short span edited a third in, its stale cache, and a fresh one."""

    def __init__(
        self, scale: Scale, found: Findings, engine: Engine, roofline: Roofline, name: str, context: int
    ) -> None:
        self.scale, self.found, self.engine, self.roofline = scale, found, engine, roofline
        self.label, self.about = f"{name} at {context}", {"model": name, "context": context}
        old, self.new, self.diff = edited(scale, context)
        self.stale, own = engine.prefill(old), plain_prefill(engine, self.new)
        self.rows = plan_of(scale, self.diff).positions
        self.allowed = allowed_by_noise(engine, own, self.diff.first)
        work = partial(recompute_error, engine, self.stale, own, self.diff.first)
        self.equal = found.compare(f"{self.label}: every row from the edit on", self.allowed, work)

    def all(self, in_time: Callable[[str], bool], graphs: bool) -> None:
        """Nothing is timed where recomputing every row is not a prefill."""
        figures = self.found.figures
        figures["repairs"].append(self.about | (self.repair() if self.equal else {"equal": False}))
        replayed = graphs and self.equal and self.replays()
        for number in self.scale.packed if self.equal else ():
            if in_time(f"{self.label}, {number} packed"):
                figures["packed"].append(self.about | {"documents": number} | self.packed(number, replayed))

    def repair(self) -> dict[str, Any]:
        """Recompute of the span and k rows against full and suffix re-prefill, interleaved rounds."""
        plan = plan_of(self.scale, self.diff)
        rows = RowMap.of_base(np.arange(len(self.new))).realigned(plan.source())
        times = compare_arms(Arms(self.engine, rows, [self.stale], self.new, plan), self.scale.rounds)
        counts = self.roofline.counts
        works = {"recompute": counts.one_pass([self.rows]), "full_prefill": counts.prefill(len(self.new))}
        shares = {name: self.roofline.beside(work, times[f"{name}_ms"]["median"]) for name, work in works.items()}
        return {"equal": True, "recomputed": len(self.rows), **times, "roofline": shares}

    def jobs(self, number: int) -> Jobs:
        return [(copy_of(self.stale, self.new), self.rows) for _ in range(number)]

    def packed(self, number: int, replayed: bool) -> dict[str, Any]:
        """Repairs of so many documents in one pass, run eagerly and replayed from a recording."""
        jobs, work = self.jobs(number), self.roofline.counts.one_pass([self.rows] * number)
        self.engine.recompute_many(jobs)
        single = self.jobs(1)
        self.engine.recompute(*single[0])
        # all of them are the same document
        error = partial(worst_apart, [cache for cache, _ in jobs], single[0][0])
        if not self.found.compare(f"{self.label}, {number} packed, against a single one", self.allowed, error):
            return {"equal": False}
        figures = {"equal": True, "eager": self.timed(jobs, work), "replayed": None}
        del jobs, single
        if replayed:
            with recording(self.scale, self.engine):
                self.engine.warm_up([len(self.rows)] * number)
                # more rows than the largest bucket are not recorded
                if self.engine.graphs.kept:
                    figures["replayed"] = self.timed(self.jobs(number), work)
        return figures

    def timed(self, jobs: Jobs, work: Any) -> dict[str, Any]:
        """A pass as it is called, and its share."""
        ms = timed_ms(self.scale, partial(self.engine.recompute_many, jobs), self.scale.rounds)
        return {"ms": ms, "ms_per_document": ms["median"] / len(jobs), **self.roofline.beside(work, ms["median"])}

    def replays(self) -> bool:
        """Whether recorded passes give the rows of eager ones at this size, too."""
        error = partial(recorded_error, self.scale, self.engine, lambda number: self.jobs(1 + number))
        return self.found.compare(f"{self.label}, recorded passes", self.allowed, error)


def plan_of(scale: Scale, diff: TokenDiff) -> RepairPlan:
    return RepairPlan(diff, np.arange(diff.first, diff.first + scale.span + scale.k), "editlocal", scale.k)


def worst_apart(caches: list[KVCache], expected: KVCache) -> float:
    return float(np.max([caches_apart(cache, expected) for cache in caches]))
