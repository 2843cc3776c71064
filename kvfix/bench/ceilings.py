"""What this process can do at best here: rate of the model's matrix products, and bandwidth of memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.bench.counts import linear_size
from kvfix.pipeline.measure import timed_ms

if TYPE_CHECKING:
    import torch

    from kvfix.engine import Engine

ROWS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 16384)}
LEAST_TRIES = 3
TRIED_S = 0.15  # for each thing that is timed
BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}


class Ceilings(NamedTuple):
    """The best that was measured."""

    operations_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float  # read and written bytes together

    @classmethod
    def of(cls, engine: Engine, linears: Sequence[Any]) -> Ceilings:
        """Measure now, on the engine's device and with this process's threads."""
        return cls(product_rate(engine, linears), *bandwidths(engine, engine.device))

    def higher(self, other: Ceilings) -> Ceilings:
        """The better of two measurements: what was possible once is possible."""
        return Ceilings(*map(max, self, other))


def best_ms(engine: Engine, work: Callable[[], object]) -> float:
    """The shortest of several calls, after one to warm up."""
    work()
    end, times = time.monotonic() + TRIED_S, list[float]()
    while len(times) < LEAST_TRIES or time.monotonic() < end:
        times.append(timed_ms(engine, work))
    return min(times)


def product_rate(engine: Engine, linears: Sequence[Any]) -> float:
    """Operations per second of the model's own matrix products: the best number of rows, over all of their shapes.

    Each shape is timed through one module that has it, and counts as often as the model has it.
    """
    import torch

    shapes = Counter(linear_size(module) for module in linears)
    examples = {linear_size(module): module for module in linears}
    rates = []
    with torch.inference_mode():
        for num_rows in ROWS[engine.device.type]:
            operations = spent_ms = 0.0
            for shape, number in shapes.items():
                assert shape is not None
                rows = torch.randn(1, num_rows, shape[0], device=engine.device).to(engine.dtype)
                spent_ms += number * best_ms(engine, partial(examples[shape], rows))
                operations += number * 2.0 * num_rows * shape[0] * shape[1]
            rates.append(operations / spent_ms * 1e3)
    return max(rates)


def bandwidths(engine: Engine, device: torch.device) -> tuple[float, float]:
    """Bytes per second of reading, and of copying, in a device's memory, over a buffer that no cache holds."""
    import torch

    source = torch.ones(_buffer_bytes(device) // 4, device=device)
    target = torch.empty_like(source)
    read_ms = best_ms(engine, source.sum)
    copy_ms = best_ms(engine, lambda: target.copy_(source))
    read, copied = source.nbytes / read_ms * 1e3, 2 * source.nbytes / copy_ms * 1e3
    # a copy reads too: reading alone cannot be slower than half of it
    return max(read, copied / 2), copied


def _buffer_bytes(device: torch.device) -> int:
    """Four times the last cache at least, as far as memory is free for two of them."""
    return min(max(BUFFER_BYTES[device.type], 4 * _last_cache_bytes(device)), free_bytes(device) // 4)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def _last_cache_bytes(device: torch.device) -> int:
    """Of the device, or of the processor as Linux describes it; 0 where that is not told."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)
