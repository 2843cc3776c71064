"""How many edited documents should share a pass: repair of several in one pass beside one after the other.

    python examples/pack_sizes.py [--tokens 500,1000,4000] [--k 8,32] [--documents 1,2,4,8,16,32] [--rounds 5]

Each document is a cache of its own with a span of two tokens a third in, and k rows behind it, which is what a repair
recomputes; the rows of the cache are made up, for what they hold takes no time. Rounds are interleaved in one process,
one to warm up is not counted; a ratio is the median of one by one / packed over the rounds.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from kvfix import Engine
from kvfix.core import KVCache
from kvfix.pipeline.measure import timed_ms

SPAN = 2


def made_up(engine: Engine, num_tokens: int, seed: int) -> KVCache:
    """A cache of tokens drawn by the seed."""
    ids = np.random.default_rng(seed).integers(100, 10_000, num_tokens)
    cache = engine.new_cache(ids)
    cache.keys.normal_()
    cache.values.normal_()
    return cache


def one_by_one(engine: Engine, jobs: list[tuple[KVCache, np.ndarray]]) -> None:
    for job in jobs:
        engine.recompute(*job)


def compared(engine: Engine, jobs: list[tuple[KVCache, np.ndarray]], rounds: int) -> tuple[float, float, float]:
    """Milliseconds a document one by one and packed, and their ratio: medians."""
    single, packed = [], []
    for _ in range(rounds + 1):
        single.append(timed_ms(engine, lambda: one_by_one(engine, jobs)) / len(jobs))
        packed.append(timed_ms(engine, lambda: engine.recompute_many(jobs)) / len(jobs))
    ratios = [s / p for s, p in zip(single[1:], packed[1:], strict=True)]
    return statistics.median(single[1:]), statistics.median(packed[1:]), statistics.median(ratios)


def study(engine: Engine, tokens: list[int], ks: list[int], numbers: list[int], rounds: int) -> None:
    """Print a line for each length, k and number of documents."""
    for num_tokens in tokens:
        caches = [made_up(engine, num_tokens, seed) for seed in range(max(numbers))]
        for k in ks:
            positions = num_tokens // 3 + np.arange(min(SPAN + k, num_tokens - num_tokens // 3))
            for number in numbers:
                jobs = [(cache, positions) for cache in caches[:number]]
                single, packed, ratio = compared(engine, jobs, rounds)
                print(
                    f"{num_tokens:5} tokens, k={k:2}, {number:2} documents ({number * len(positions):4} rows): "
                    f"{single:6.1f} ms a document one by one, {packed:6.1f} ms packed, ratio {ratio:.2f}",
                    flush=True,
                )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=numbers, default=[500, 1000, 4000])
    parser.add_argument("--k", type=numbers, default=[8, 32])
    parser.add_argument("--documents", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    study(Engine.open(given.model), given.tokens, given.k, given.documents, given.rounds)


if __name__ == "__main__":
    main()
