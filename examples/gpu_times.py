"""What `gpu_check.py` times of ops: each as a share of the copy bandwidth; equal results only."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_equality import OP, Findings, apart, random
from gpu_scales import Scale

from kvfix.core import LayerRotation, Run
from kvfix.ops import Pack, Part, kv_deviation, packed_attention, rotate_keys, scatter_kv
from kvfix.ops.positional_attention.naive import packed_attention_naive
from kvfix.ops.positional_attention.tiles import Tiling, choose_tiling
from kvfix.pipeline.measure import spread


def wait(scale: Scale) -> None:
    if scale.device == "cuda":
        torch.cuda.synchronize()


def timed_ms(scale: Scale, work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Of single calls, after two to warm up (one where a kernel is interpreted)."""
    samples, warm_up = [], 2 if scale.device == "cuda" else 1
    for _ in range(repeats + warm_up):
        wait(scale)
        start = time.perf_counter()
        work()
        wait(scale)
        samples.append((time.perf_counter() - start) * 1e3)
    return spread(samples[warm_up:])


def replayed_ms(scale: Scale, work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """The device's own time: launches are recorded once and replayed, so that it never waits for Python."""
    if scale.device != "cuda":
        return timed_ms(scale, work, repeats)
    work()
    wait(scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return timed_ms(scale, graph.replay, repeats)


# ---- ops


class Bench:
    """Keys and values of as many layers as a model has, so that no cache holds them, and a repair's last rows."""

    def __init__(self, scale: Scale) -> None:
        layers, query_heads, heads, dim = scale.heads
        self.scale, self.num_rows = scale, scale.k + scale.span
        self.at = torch.arange(scale.keys - self.num_rows, scale.keys)
        self.query = random(scale, scale.dtype, query_heads, self.num_rows, dim)
        self.fresh = [random(scale, scale.dtype, layers, heads, self.num_rows, dim) for _ in range(2)]
        self.keys, self.values = (
            torch.randn(layers, heads, scale.keys, dim, device=scale.device, dtype=scale.dtype) for _ in range(2)
        )
        self.num_bytes = 2 * self.keys.numel() * self.keys.element_size()
        self.copy_rate = self._copy_rate()

    def pack(self) -> Pack:
        return Pack([Part(self.keys, self.values, self.at, self.scale.keys, self.at)])

    def _copy_rate(self) -> float:
        """Bytes read and written a second by a copy of a large tensor."""
        source = torch.empty(self.scale.copied_bytes // 2, dtype=torch.uint8, device=self.scale.device)
        target = torch.empty_like(source)
        ms = timed_ms(self.scale, lambda: target.copy_(source), self.scale.repeats)["median"]
        return 2 * source.numel() / ms * 1e3

    def figure(self, ms: dict[str, float], num_bytes: int | None = None) -> dict[str, Any]:
        """A time, and the bytes that had to move as a share of what a copy moves in it."""
        num_bytes = num_bytes or self.num_bytes
        return {"ms": ms, "bytes": num_bytes, "share_of_copy": num_bytes / ms["median"] * 1e3 / self.copy_rate}


def time_ops(scale: Scale, found: Findings) -> None:
    bench, repeats = Bench(scale), scale.repeats
    layers, query_heads, heads, dim = scale.heads
    found.figures["ops"] = {
        "copy_bytes_per_s": bench.copy_rate,
        "shape": {
            "rows": bench.num_rows,
            "keys": scale.keys,
            "layers": layers,
            "heads": [query_heads, heads],
            "dim": dim,
        },
        "positional_attention": time_attention(bench, found),
    }
    written, fresh = bench.pack(), bench.fresh
    rotations = [LayerRotation(tuple(10000.0 ** -(2 * n / dim) for n in range(dim // 2)))] * layers
    turn = partial(rotate_keys, bench.keys, [Run(0, scale.keys, 0, 0, 7)], rotations)
    deviate = partial(each_layer, lambda n: kv_deviation([(bench.keys[n], bench.values[n])]), range(layers))
    num_fresh = 4 * fresh[0].numel() * fresh[0].element_size()
    found.figures["ops"] |= {
        "scatter_kv": bench.figure(replayed_ms(scale, partial(scatter_kv, written, 0, *fresh), repeats), num_fresh),
        # as it is called: it sends its tables each time; in place, so that all keys are read and written
        "rotate_keys": bench.figure(timed_ms(scale, turn, repeats)),
        "kv_deviation": bench.figure(replayed_ms(scale, deviate, repeats)),
    }


def tilings_of(bench: Bench) -> list[Tiling]:
    """The one that a call takes by itself, first; then others, to see whether it should."""
    scale = bench.scale
    _, query_heads, heads, dim = scale.heads
    processors = torch.cuda.get_device_properties(0).multi_processor_count if scale.device == "cuda" else 4
    chosen = choose_tiling(bench.num_rows * query_heads // heads, dim, bench.query.element_size(), processors)
    others = [Tiling(*sizes, chosen.num_programs) for sizes in scale.tilings]
    return [chosen, *(chosen._replace(num_programs=each * processors) for each in scale.programs), *others]


def each_layer(one: Callable[[int], torch.Tensor], layers: range) -> list[torch.Tensor]:
    return [one(layer) for layer in layers]


def last_apart(every: Callable[[], list[torch.Tensor]], expected: torch.Tensor) -> float:
    return apart(every()[-1], expected)


def time_attention(bench: Bench, found: Findings) -> list[dict[str, Any]]:
    """Every layer once, by each tiling and by PyTorch; a tiling that is not equal to the twin has no time."""
    from kvfix.ops.positional_attention.kernel import packed_attention_kernel

    scale, query, layers = bench.scale, bench.query, range(bench.scale.heads[0])
    scaling, plain, rows = query.shape[-1] ** -0.5, bench.pack(), []
    expected = packed_attention_naive(query, plain, layers[-1], scaling=scaling)
    for number, tiling in enumerate(tilings_of(bench)):
        one = partial(packed_attention_kernel, query, bench.pack(), scaling=scaling, tiling=tiling)
        every = partial(each_layer, one, layers)
        label = f"attention in tiles {'x'.join(map(str, tiling))}"
        if found.compare(label, OP[query.dtype], partial(last_apart, every, expected)):
            row = {"tiling": tiling._asdict(), "chosen": number == 0}
            rows.append(row | bench.figure(replayed_ms(scale, every, scale.repeats)))
            rows[-1]["called_ms"] = timed_ms(scale, every, scale.repeats)
    one = partial(packed_attention, query, plain, scaling=scaling, backend="torch")
    ms = timed_ms(scale, partial(each_layer, one, layers), scale.repeats)
    return [*rows, {"tiling": None, "chosen": False, **bench.figure(ms)}]
