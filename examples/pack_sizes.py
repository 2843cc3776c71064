"""How many edited documents should share a pass: repair of several in one pass beside one after the other.

    python examples/pack_sizes.py [--tokens 500,1000,4000] [--k 8,32] [--documents 1,2,4,8,16,32] [--rounds 5] [--cpu]

Each document is a cache of its own with a span of two tokens a third in, and k rows behind it, which is what a repair
recomputes; the rows of the cache are made up, for what they hold takes no time. Rounds are interleaved in one process,
one to warm up is not counted; a ratio is the median of one by one / packed over the rounds. With --cpu it is processor
time that is measured, which says more than wall time on a machine that others use too: give OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvfix import Engine
from kvfix.core import KVCache
from kvfix.pipeline.measure import timed_ms

SPAN = 2
Timed = Callable[[Engine, Callable[[], object]], float]


def made_up(engine: Engine, num_tokens: int, seed: int) -> KVCache:
    """A cache of tokens drawn by the seed."""
    ids = np.random.default_rng(seed).integers(engine.config.get_text_config().vocab_size, size=num_tokens)
    cache = engine.new_cache(ids)
    cache.keys.normal_()
    cache.values.normal_()
    return cache


def one_by_one(engine: Engine, jobs: list[tuple[KVCache, np.ndarray]]) -> None:
    for job in jobs:
        engine.recompute(*job)


def cpu_ms(engine: Engine, work: Callable[[], object]) -> float:
    """Milliseconds of this process's processors."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


def compared(
    engine: Engine, jobs: list[tuple[KVCache, np.ndarray]], rounds: int, timed: Timed
) -> tuple[float, float, float]:
    """Milliseconds a document one by one and packed, and their ratio: medians."""
    single, packed = [], []
    for _ in range(rounds + 1):
        single.append(timed(engine, lambda: one_by_one(engine, jobs)) / len(jobs))
        packed.append(timed(engine, lambda: engine.recompute_many(jobs)) / len(jobs))
    ratios = [s / p for s, p in zip(single[1:], packed[1:], strict=True)]
    return statistics.median(single[1:]), statistics.median(packed[1:]), statistics.median(ratios)


def study(engine: Engine, given: argparse.Namespace) -> None:
    """Print a line for each length, k and number of documents."""
    timed = cpu_ms if given.cpu else timed_ms
    for num_tokens in given.tokens:
        caches = [made_up(engine, num_tokens, seed) for seed in range(max(given.documents))]
        for k in given.k:
            positions = num_tokens // 3 + np.arange(min(SPAN + k, num_tokens - num_tokens // 3))
            for number in given.documents:
                jobs = [(cache, positions) for cache in caches[:number]]
                single, packed, ratio = compared(engine, jobs, given.rounds, timed)
                print(
                    f"{num_tokens:5} tokens, k={k:2}, {number:2} documents ({number * len(positions):4} rows): "
                    f"{single:6.1f} ms a document one by one, {packed:6.1f} ms packed, ratio {ratio:.2f}",
                    flush=True,
                )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=numbers, default=[500, 1000, 4000])
    parser.add_argument("--k", type=numbers, default=[8, 32])
    parser.add_argument("--documents", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)
    study(Engine.open(given.model), given)


if __name__ == "__main__":
    main()
