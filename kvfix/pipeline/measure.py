"""Times of a repair and of what it is compared with: interleaved, in one process, after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfix import align
from kvfix.core import KVCache, RowMap

if TYPE_CHECKING:
    from kvfix.core import RepairPlan
    from kvfix.engine import Engine
    from kvfix.pipeline.plan import Change

ROUNDS = 5
SETTLING_ROWS = 64
BASELINES = dict.fromkeys(("full", "suffix"), "kvfix") | dict.fromkeys(("plain_full", "plain_suffix"), "plain forward")

Arm = tuple[str, int]  # what is timed, and what tells it from its like: a repair's number, a suffix's first row


def spread(samples: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, and the smallest."""
    p20, p80 = (float(np.percentile(samples, q)) for q in (20, 80))
    return {"median": statistics.median(samples), "p20": p20, "p80": p80, "best": min(samples)}


def ratio_spread(slow: list[float], fast: list[float]) -> dict[str, float]:
    """The pairwise ratios slow / fast; `best` is the ratio of the two smallest times."""
    return {**spread([s / f for s, f in zip(slow, fast, strict=True)]), "best": min(slow) / min(fast)}


def timed_ms(engine: Engine, work: Callable[[], object]) -> float:
    """Milliseconds of one call, the device's queue drained on both sides."""
    engine.synchronize()
    start = time.perf_counter()
    work()
    engine.synchronize()
    return (time.perf_counter() - start) * 1e3


class Arms:
    """The ways of bringing one cache up to date, each ready to be timed alone.

    All of them start from rows in memory; none pays for reading the store.
    """

    def __init__(self, engine: Engine, rows: RowMap, segments: Any, token_ids: np.ndarray, plan: RepairPlan) -> None:
        self.engine, self.rows, self.segments = engine, rows, segments
        self.token_ids, self.plan, self.first = token_ids, plan, plan.diff.first
        self.last = int(plan.positions[-1]) + 1 if len(plan.positions) else 0
        self.cache: KVCache | None = None

    def settle(self) -> None:
        """Untimed, before every arm: a short pass, so that the system gives memory back for nobody but itself.

        What a long pass has freed takes it 10 to 20 ms, which would count for the arm that comes next.
        """
        self.engine.prefill(self.token_ids[:SETTLING_ROWS])

    def ready(self, room: int = 0) -> None:
        """Untimed: the stale rows in memory, keys as stored, as far as the repair reads them; `room` rows behind."""
        self.cache = align.allocate(self.segments[0], self.rows, self.token_ids, room, self.engine.device)
        align.gather(self.cache, self.rows, self.segments, 0, self.last)

    def repair(self) -> None:
        """Align and recompute."""
        assert self.cache is not None
        align.turn(self.cache, self.rows, self.engine.rotations, 0, self.last)
        self.engine.recompute(self.cache, self.plan.positions)

    def finish(self) -> KVCache:
        """Untimed: the repaired cache with the rows behind the last repaired one, aligned."""
        assert self.cache is not None
        align.gather(self.cache, self.rows, self.segments, self.last)
        align.turn(self.cache, self.rows, self.engine.rotations, self.last)
        return self.cache

    def full(self, room: int = 0) -> KVCache:
        """A fresh prefill of the whole text."""
        return self.engine.prefill(self.token_ids, room=room)

    def plain_full(self) -> None:
        """The whole text by the model's own forward."""
        self.engine.plain_forward(self.token_ids)

    def suffix(self, fresh: KVCache) -> None:
        """Every row from the edit on, behind the cached prefix, by kvfix."""
        self.engine.recompute(fresh, np.arange(self.first, len(self.token_ids)))

    def prefix_cache(self, fresh: KVCache) -> Any:
        """Untimed: the rows before the edit as a transformers cache."""
        from kvfix.engine import as_transformers_cache

        return as_transformers_cache(fresh, self.first)

    def plain_suffix(self, prefix: Any) -> None:
        """Every row from the edit on, behind the cached prefix, by the model's own forward."""
        # models cannot take a pass over no rows, which is what a deleted end leaves
        if self.first < len(self.token_ids):
            self.engine.plain_forward(self.token_ids[self.first :], prefix)


def medians(engine: Engine, change: Change, plan: RepairPlan, rounds: int = ROUNDS) -> dict[str, Any]:
    """Repair against full and suffix re-prefill, `rounds` interleaved rounds after one to warm up."""
    rows = change.snapshot.rows.realigned(plan.source())
    return compare_arms(Arms(engine, rows, change.snapshot.segments, change.new.token_ids, plan), rounds)


def compare_arms(arms: Arms, rounds: int = ROUNDS) -> dict[str, Any]:
    """Interleaved times of all arms; each time and ratio as a spread.

    Each baseline, full and suffix, is the faster of kvfix's own passes and the model's plain forward.
    """
    return compare_all([arms], rounds)[0]


def compare_all(repairs: Sequence[Arms], rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """`compare_arms` of several repairs that lead to one text.

    Each round re-prefills that text once for all of them, and a suffix once for all whose edits begin where it does.
    """
    times: dict[Arm, list[float]] = {}
    for _ in range(rounds + 1):
        for arm, ms in _round(repairs):
            times.setdefault(arm, []).append(ms)
    kept = {arm: samples[1:] for arm, samples in times.items()}
    return [_compared(kept, number, arms.first, rounds) for number, arms in enumerate(repairs)]


def _compared(kept: dict[Arm, list[float]], number: int, first: int, rounds: int) -> dict[str, Any]:
    """One repair beside its baselines."""
    repair, plain = kept["repair", number], kept["plain_full", 0]
    full = _faster(kept, ("full", 0), ("plain_full", 0))
    suffix = _faster(kept, ("suffix", first), ("plain_suffix", first))
    return {
        "rounds": rounds,
        "full_prefill_ms": spread(kept[full]),
        "full_baseline": BASELINES[full[0]],
        "suffix_prefill_ms": spread(kept[suffix]),
        "suffix_baseline": BASELINES[suffix[0]],
        "recompute_ms": spread(repair),
        "speedup_full": ratio_spread(kept[full], repair),
        "speedup_suffix": ratio_spread(kept[suffix], repair),
        "plain_forward_ms": spread(plain),
        "prefill_speed": ratio_spread(plain, kept["full", 0]),
    }


def _round(repairs: Sequence[Arms]) -> Iterator[tuple[Arm, float]]:
    """Each arm once, in milliseconds."""
    any_arms, fresh = repairs[0], list[KVCache]()
    engine = any_arms.engine
    any_arms.settle()
    yield ("full", 0), timed_ms(engine, lambda: fresh.append(any_arms.full()))
    any_arms.settle()
    with engine.plain_attention():
        yield ("plain_full", 0), timed_ms(engine, any_arms.plain_full)
    for number, arms in enumerate(repairs):
        arms.ready()
        arms.settle()
        yield ("repair", number), timed_ms(engine, arms.repair)
        arms.cache = None
    for first, arms in {arms.first: arms for arms in repairs}.items():
        arms.settle()
        yield ("suffix", first), timed_ms(engine, partial(arms.suffix, fresh[0]))
        prefix = arms.prefix_cache(fresh[0])
        arms.settle()
        with engine.plain_attention():
            yield ("plain_suffix", first), timed_ms(engine, partial(arms.plain_suffix, prefix))


def _faster(kept: dict[Arm, list[float]], *arms: Arm) -> Arm:
    return min(arms, key=lambda arm: statistics.median(kept[arm]))
