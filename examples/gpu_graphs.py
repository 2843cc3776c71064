"""Recorded passes in `gpu_check.py`: the rows that a replay gives, against those of the same pass run eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from gpu_equality import OP, PASS, Findings, caches_apart, copy_of, edited, random_engine
from gpu_scales import Scale

from kvfix.core import KVCache
from kvfix.engine import Engine, graphs

Jobs = list[tuple[KVCache, np.ndarray]]


class Again:
    """Without a GPU: replaying is doing the work again."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        work()

    def replay(self) -> None:
        self.work()


@contextmanager
def recording(scale: Scale, engine: Engine) -> Iterator[None]:
    """Passes are recorded and replayed; what would switch that off with a warning raises."""
    graphs._failed.clear()
    recorder = graphs.CudaRecorder(engine.device) if scale.device == "cuda" else Again
    engine.graphs = graphs.Graphs(engine, recorder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            yield
    finally:
        engine.graphs = None


def recorded_error(scale: Scale, engine: Engine, jobs_of: Callable[[int], Jobs]) -> float:
    """How far replays lie from eager passes over a few sets of rows, each after a recording made with other rows."""
    worst = []
    for number in range(scale.sets):
        eager, replayed = jobs_of(number), jobs_of(number)
        engine.recompute_many(eager)
        with recording(scale, engine):
            engine.warm_up([len(rows) for _, rows in replayed])
            kinds = list(engine.graphs.kept)
            engine.recompute_many(replayed)
            if not kinds or list(engine.graphs.kept) != kinds:
                raise RuntimeError("the pass was not replayed")
        worst += [caches_apart(mine, theirs) for (mine, _), (theirs, _) in zip(replayed, eager, strict=True)]
    return float(np.max(worst))


def check_graphs(scale: Scale, found: Findings) -> bool:
    """Whether recorded passes of a small random model are equal in each dtype; nothing else depends on it."""
    equal = True
    for dtype in OP if scale.device == "cuda" else (scale.dtype,):
        engine = random_engine(scale, "llama", scale.small, dtype, spread=3)
        old, new, _ = edited(scale, scale.num_tokens)
        stale = engine.prefill(old)

        def jobs_of(number: int, stale: KVCache = stale, new: np.ndarray = new) -> Jobs:
            rows = np.arange(5 + number, 9 + 2 * number)
            return [(copy_of(stale, new), rows + n) for n in range(number + 1)]

        label = f"recorded passes {str(dtype).removeprefix('torch.')}"
        equal &= found.compare(label, PASS[dtype], partial(recorded_error, scale, engine, jobs_of))
    return equal
