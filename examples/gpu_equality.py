"""What `gpu_check.py` compares before it times anything: kernels with their twins, passes with fresh prefills."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_scales import Scale, Variant

from kvfix.core import EditSpan, KVCache, LayerRotation, Run, TokenDiff
from kvfix.engine import Engine
from kvfix.engine.rotation import find_rotations
from kvfix.ops import Pack, Part, kv_deviation, packed_attention, rotate_keys, scatter_kv
from kvfix.ops.kv_deviation.naive import kv_deviation_naive
from kvfix.ops.positional_attention.naive import packed_attention_naive
from kvfix.ops.rotate_keys.naive import rotate_keys_naive
from kvfix.ops.scatter_kv.naive import scatter_kv_naive

# relative root mean square: of an op as in the tests, and of whole passes
OP = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PASS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DEVIATION = 1e-5


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Findings:
    """What was found: comparisons, and figures of what they hold for."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def compare(self, name: str, allowed: float, work: Callable[[], float]) -> bool:
        """Record how far two ways lie apart; a way that raises is a failure, and the others go on."""
        error, said = None, None
        try:
            error = float(work())
        except Exception as fault:  # whatever a compiler or a driver raises
            said = f"{type(fault).__name__}: {fault}"[:500]
        # NaN compares false
        ok = error is not None and error <= allowed
        self.checks.append({"check": name, "error": error, "allowed": allowed, "ok": ok, "said": said})
        show(f"{'equal' if ok else 'NOT EQUAL'}: {name}: {said or f'{error:.1e}'} (allowed {allowed:.1e})")
        return ok

    @property
    def equal(self) -> bool:
        return all(check["ok"] for check in self.checks)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference relative to that of `other`."""
    one, other = one.float(), other.float()
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


def caches_apart(one: KVCache, other: KVCache) -> float:
    """The worst layer's `apart`, keys and values."""
    layers = range(one.num_layers)
    # NaN stays NaN in numpy's maximum
    return float(np.max([apart(*pair) for n in layers for pair in zip(one.layer(n), other.layer(n), strict=True)]))


# ---- kernels against twins


def check_ops(scale: Scale, found: Findings) -> None:
    for dtype in OP:
        name = str(dtype).removeprefix("torch.")
        for variant in scale.variants:
            dims, groups, rules = variant
            label = f"attention {name} {dims[0]}/{dims[1]} x{groups} {'+'.join(rules)}".rstrip()
            found.compare(label, OP[dtype], partial(attention_error, scale, dtype, variant))
        found.compare(f"rotation {name}", OP[dtype], partial(rotation_error, scale, dtype))
        found.compare(f"scatter {name}", 0.0, partial(scatter_error, scale, dtype))
        found.compare(f"deviation {name}", DEVIATION, partial(deviation_error, scale, dtype))


def made_pack(scale: Scale, dtype: torch.dtype, dim: int, value_dim: int, hidden: bool = False) -> Pack:
    """Documents of odd sizes, two layers; hidden: every third slot is another's."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for num_rows, num_keys in scale.documents:
        keys, values = (random(scale, dtype, 2, 2, num_keys, d, generator=generator) for d in (dim, value_dim))
        at = torch.randperm(num_keys, generator=generator)[:num_rows].sort().values
        places = torch.arange(num_keys)
        places[(places % 3 == 1) & ~torch.isin(places, at)] = torch.iinfo(torch.int64).max
        parts.append(Part(keys, values, at, num_keys, at, places if hidden else None))
    return Pack(parts)


def random(scale: Scale, dtype: torch.dtype, *shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.randn(shape, generator=generator or torch.Generator().manual_seed(1)).to(scale.device, dtype)


def attention_error(scale: Scale, dtype: torch.dtype, variant: Variant) -> float:
    dims, groups, given = variant
    pack = made_pack(scale, dtype, *dims, hidden=given.get("hidden", False))
    rules: dict[str, Any] = {"scaling": dims[0] ** -0.5, "window": given.get("window"), "softcap": given.get("softcap")}
    if given.get("sinks"):
        rules["sinks"] = torch.linspace(-2, 2, 2 * groups, device=scale.device)
    query = 3 * random(scale, dtype, 2 * groups, pack.starts[-1], dims[0])
    out = packed_attention(query, pack, 1, backend="triton", **rules)
    return apart(out, packed_attention_naive(query, pack, 1, **rules))


def rotation_error(scale: Scale, dtype: torch.dtype) -> float:
    """Gathered and turned: in halves, in part and interleaved, not at all."""
    keys, source = random(scale, dtype, 3, 2, 111, 80), random(scale, dtype, 3, 2, 111, 80).flip(0).contiguous()
    freqs = tuple(10000.0 ** -(n / 30) for n in range(30))
    rotations = [LayerRotation(freqs), LayerRotation(freqs[:7], interleaved=True), LayerRotation(())]
    runs, expected = [Run(0, 13, 0, 5, 7), Run(70, 111, 0, 63, -7000)], keys.clone()
    for run in runs:
        deltas = torch.full((run.end - run.start,), run.delta, device=scale.device)
        for layer, rotation in enumerate(rotations):
            come = source[layer, :, run.row : run.row + len(deltas)]
            inv_freq = torch.tensor(rotation.inv_freq, device=scale.device)
            expected[layer, :, run.start : run.end] = rotate_keys_naive(come, deltas, inv_freq, rotation.interleaved)
    rotate_keys(keys, runs, rotations, source=source, backend="triton")
    return apart(keys, expected)


def scatter_error(scale: Scale, dtype: torch.dtype) -> float:
    pack, expected = (made_pack(scale, dtype, 80, 24) for _ in range(2))
    rows = [random(scale, dtype, 1, 2, pack.starts[-1], dim) for dim in (80, 24)]
    scatter_kv(pack, 1, *rows, backend="triton")
    scatter_kv_naive(expected, 1, *rows)
    pairs = list(zip(pack.parts, expected.parts, strict=True))
    return float(np.max([apart(getattr(a, name), getattr(b, name)) for a, b in pairs for name in ("keys", "values")]))


def deviation_error(scale: Scale, dtype: torch.dtype) -> float:
    keys, values = random(scale, dtype, 2, 3, 63, 128), random(scale, dtype, 2, 3, 63, 80)
    pairs = [(keys[0], keys[1]), (values[0], values[1])]
    return apart(kv_deviation(pairs, backend="triton"), kv_deviation_naive(pairs))


# ---- passes of random models


def random_engine(scale: Scale, kind: str, sizes: dict[str, Any], dtype: torch.dtype, spread: float = 1.0) -> Engine:
    """A random model on the device; a larger spread makes attention sharp, and a wrong mask visible."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device(scale.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=dtype)
    if spread != 1:
        for parameter in model.parameters():
            parameter.data.mul_(spread if parameter.ndim > 1 else 1)
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    engine = Engine.of_model(model, PreTrainedTokenizerFast(tokenizer_object=words), kind)
    # whatever KVFIX_CUDA_GRAPHS says: each way has its own figures
    engine.graphs = None
    return engine


def edited(scale: Scale, context: int) -> tuple[np.ndarray, np.ndarray, TokenDiff]:
    """Random tokens, the same with a span replaced a third in, and the difference."""
    old = np.random.default_rng(context).integers(5, 500, context)
    first, end = context // 3, context // 3 + scale.span
    new, source = old.copy(), np.arange(context)
    new[first:end] = 5 + (old[first:end] - 4) % 495
    source[first:end] = -1
    return old, new, TokenDiff((EditSpan(first, end, first, end),), context, source)


def plain_prefill(engine: Engine, ids: np.ndarray, first: int = 0) -> KVCache:
    """The model's own forward, at once or in two parts."""
    cache = engine.new_cache(ids)
    with engine.plain_attention():
        own = engine.plain_forward(ids[:first]) if first else None
        own = engine.plain_forward(ids[first:], own)
    for number, layer in enumerate(own.layers):
        cache.keys[number], cache.values[number] = layer.keys[0], layer.values[0]
    return cache


def allowed_by_noise(engine: Engine, own: KVCache, first: int) -> float:
    """Twice what the model's own forward, in one pass and in two, leaves open; never less than the dtype's own."""
    return max(PASS[engine.dtype], 2 * caches_apart(plain_prefill(engine, own.token_ids, first), own))


def check_passes(scale: Scale, found: Findings) -> None:
    for dtype in OP if scale.device == "cuda" else (scale.dtype,):
        name = str(dtype).removeprefix("torch.")
        engine = random_engine(scale, "llama", scale.small, dtype, spread=3)
        old, new, diff = edited(scale, scale.num_tokens)
        own, stale = plain_prefill(engine, new), engine.prefill(old)
        allowed = allowed_by_noise(engine, own, diff.first)
        for label, work in (
            ("prefill", lambda: caches_apart(engine.prefill(new), own)),  # noqa: B023
            ("recompute all rows", partial(recompute_error, engine, stale, own, 0)),
            ("recompute the suffix", partial(recompute_error, engine, stale, own, diff.first)),
            ("packed", partial(packed_error, engine, stale, new)),
            ("moved keys", partial(moved_error, engine, own)),
        ):
            found.compare(f"{label} {name}", allowed, work)


def recompute_error(engine: Engine, stale: KVCache, fresh: KVCache, first: int) -> float:
    cache = copy_of(stale, fresh.token_ids)
    engine.recompute(cache, np.arange(first, len(cache)))
    return caches_apart(cache, fresh)


def copy_of(cache: KVCache, token_ids: np.ndarray) -> KVCache:
    return KVCache(cache.keys.clone(), cache.values.clone(), token_ids, cache.origin)


def packed_error(engine: Engine, stale: KVCache, new: np.ndarray) -> float:
    """Repairs of several documents in one pass against the same one by one."""
    jobs, singly = ([(copy_of(stale, new), np.arange(9 + n, 20 + 2 * n)) for n in range(3)] for _ in range(2))
    engine.recompute_many(jobs)
    for job in singly:
        engine.recompute(*job)
    return float(np.max([caches_apart(one, other) for (one, _), (other, _) in zip(jobs, singly, strict=True)]))


def moved_error(engine: Engine, own: KVCache) -> float:
    """Keys turned by a few places against the same tokens computed there, in each layer."""
    rotations, finding = find_rotations(engine, own.token_ids[:144], 0.01)
    return finding["key_error"] if rotations else float("inf")
