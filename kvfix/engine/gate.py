"""The correctness gate: before a model's caches are stored, what kvfix computes with it is compared with the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvfix.align import allocate, gather, turn
from kvfix.core import KVCache, LayerRotation, RowMap
from kvfix.diff import diff_tokens
from kvfix.engine.attention import Pass
from kvfix.engine.cache import Rows
from kvfix.engine.continuations import Continuation
from kvfix.engine.engine import Engine
from kvfix.engine.packed import dense_weights
from kvfix.engine.refusals import refuse_by_config, refuse_by_trace
from kvfix.engine.rotation import find_rotations
from kvfix.errors import UnsupportedModelError, first_line
from kvfix.ops.positional_attention.naive import packed_attention_naive

TEXT = """The harbour office keeps one ledger for every berth. Vessels under twelve metres pay by the day, larger ones
by the week, and the fee is doubled in August. When a skipper leaves early, the clerk writes the date in the third
column and returns what was paid too much. Repairs to the crane are booked apart: the workshop sends its slip on Friday,
and two people sign it. Nobody may sign for himself. If the ledger and the cash box differ by more than five crowns, the
count is made again the same evening, and the harbour master is told before the gate is locked. Old ledgers are kept for
ten years in the dry room above the boat house, in the order of their numbers."""

GATE_TOKENS = 144
FP32_TOLERANCE = 1e-4
HALF_TOLERANCE = 2.0**-6
# what architectures raise that keep another kind of state, or take other arguments
FORWARD_FAULTS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Figures:
    """Largest deviations found, relative to the larger of 1 and a layer's largest entry."""

    prefill: float  # our prefill against the model's own forward, its weights as they are stored
    recompute_all: float  # R over all rows against a fresh prefill
    recompute_suffix: float  # R over [s, N)
    recompute_window: float  # R over a short window, against the model's own forward behind a prefix
    recompute_scattered: float  # R over scattered rows, against dense masked attention in fp32
    alignment: float  # several spans that change the length, then everything after the first recomputed
    packed: float  # one pass over several texts against single passes


def run_gate(engine: Engine) -> dict[str, Any]:
    """Compare and report, JSON-ready; sets `engine.rotations`.

    Raises `UnsupportedModelError` with the reason and the figures for a model that kvfix would garble.
    """
    refuse_by_config(engine)
    ids = _gate_ids(engine)
    try:
        noise, figures = _noise(engine, ids), _compare(engine, ids)
    except torch.OutOfMemoryError:
        raise
    except FORWARD_FAULTS as error:
        raise UnsupportedModelError(
            f"{engine.name}: kvfix cannot run its forward pass ({type(error).__name__}: {first_line(error)})"
        ) from error
    tolerance = FP32_TOLERANCE if engine.dtype == torch.float32 else max(HALF_TOLERANCE, 2 * noise["rows"])
    # NaN compares false
    failed = [name for name, value in vars(figures).items() if not value <= tolerance]
    if failed:
        shown = ", ".join(f"{name} {getattr(figures, name):.2e}" for name in failed)
        raise UnsupportedModelError(
            f"{engine.name} fails the correctness gate ({shown}; allowed {tolerance:.1e}): its caches would be wrong"
        )
    rotations, finding = find_rotations(engine, ids, noise["rows"])
    engine.rotations = rotations
    return {
        "model": engine.name,
        "dtype": engine.dtype_name,
        "backend": engine.backend,
        "attention": engine.default_attention,
        "shape": engine.shape._asdict(),
        "num_tokens": len(ids),
        "tolerance": tolerance,
        "figures": vars(figures),
        "noise": noise,
        "rotation": finding,
    }


def _gate_ids(engine: Engine) -> np.ndarray:
    ids = engine.text.encode(TEXT).token_ids[:GATE_TOKENS]
    limit = engine.positions.max_tokens or len(ids) + 64
    ids = ids[: max(0, min(len(ids), limit - 24))]
    if len(ids) < 24:
        raise UnsupportedModelError(f"{engine.name}: takes {limit} tokens at most; too few to check it")
    return ids


def deviation(one: KVCache, other: KVCache, rows: slice | np.ndarray = slice(None)) -> float:
    """Largest |difference| of keys and values over layers, relative to max(1, the layer's largest entry)."""
    worst = 0.0
    for layer in range(one.num_layers):
        for mine, theirs in zip(one.layer(layer), other.layer(layer), strict=True):
            mine, theirs = mine[:, rows].float(), theirs[:, rows].float()
            difference = (mine - theirs).abs().max()
            # NaN, or an infinity on either side; `max` would pass over it
            if not torch.isfinite(difference):
                return float("nan")
            worst = max(worst, float(difference) / max(1.0, float(theirs.abs().max())))
    return worst


@contextmanager
def _nudged(engine: Engine) -> Iterator[None]:
    """Let every other number that enters the first layer be one rounding larger."""

    def nudge(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., ::2] *= 1 + torch.finfo(output.dtype).eps
        return output

    hook = engine.model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


def _own(engine: Engine, ids: np.ndarray, prefix: int = 0) -> KVCache:
    """The model's own forward in its default attention, at once or behind a prefix of its own."""
    cache = engine.new_cache(ids, 0)
    with engine.plain_attention():
        own = engine.plain_forward(ids[:prefix]) if prefix else None
        own = engine.plain_forward(ids[prefix:], own)
    for layer, entry in enumerate(own.layers):
        keys, values = cache.layer(layer)
        keys.copy_(entry.keys[0])
        values.copy_(entry.values[0])
    return cache


def _copy(cache: KVCache) -> KVCache:
    return KVCache(cache.keys.clone(), cache.values.clone(), cache.token_ids.copy(), cache.origin.copy())


def _repaired(engine: Engine, stale: KVCache, ids: np.ndarray, positions: np.ndarray) -> KVCache:
    cache = _copy(stale)
    cache.token_ids = ids
    engine.recompute(cache, positions)
    return cache


def _noise(engine: Engine, ids: np.ndarray) -> dict[str, float]:
    """What arithmetic leaves open: the same text in one pass, in parts, and nudged by a rounding.

    `rows` is the model's own, `nats` that of an answer's log-probability. In half precision, where `rows` decides,
    one sample says little.
    """
    at_once, num = _own(engine, ids), len(ids)
    samples = [_own(engine, ids, num // 2)]
    if engine.dtype != torch.float32:
        samples += [_own(engine, ids, num // 4), _own(engine, ids, num - num // 4)]
    ours, chunked = engine.prefill(ids, room=16), engine.new_cache(ids, room=16)
    for part in np.array_split(np.arange(num), 3):
        engine.recompute(chunked, part)
    with _nudged(engine):
        samples.append(_own(engine, ids))
        nudged = engine.prefill(ids, room=16)
    of_ours, *others = (_answer(engine, cache, ids) for cache in (ours, chunked, nudged))
    return {
        "rows": max(deviation(sample, at_once) for sample in samples),
        "nats": max(float((other - of_ours).abs().max()) for other in others),
    }


def _answer(engine: Engine, cache: KVCache, ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities of a few tokens behind the text."""
    tried = Continuation(ids[:4].tolist(), ids[4:12].tolist())
    return next(engine.answer_logprobs(cache, [tried])).gather(1, torch.tensor(tried.answer_ids)[:, None])


def _compare(engine: Engine, ids: np.ndarray) -> Figures:
    num = len(ids)
    start, end = num // 3, num // 3 + 3
    changed = ids.copy()
    changed[start:end] = np.roll(ids, num // 2)[start:end]
    stale, fresh = _traced_prefill(engine, ids), engine.prefill(changed)
    with dense_weights(engine.model):
        own = _own(engine, ids)
    window = np.arange(start, min(num, end + 8))
    scattered = np.arange(start, num, 3)
    return Figures(
        prefill=deviation(stale, own),
        recompute_all=deviation(_repaired(engine, stale, changed, np.arange(num)), fresh),
        recompute_suffix=deviation(_repaired(engine, stale, changed, np.arange(start, num)), fresh),
        recompute_window=deviation(
            _repaired(engine, stale, changed, window), _own(engine, changed, start), slice(0, int(window[-1]) + 1)
        ),
        recompute_scattered=deviation(
            _repaired(engine, stale, changed, scattered), _naively_repaired(engine, stale, changed, scattered)
        ),
        alignment=_alignment(engine, ids, stale),
        packed=_packed(engine, ids, stale, changed, window),
    )


def _traced_prefill(engine: Engine, ids: np.ndarray) -> KVCache:
    cache = engine.new_cache(ids)
    this = Pass([Rows.at(cache, np.arange(len(ids)))])
    updated = engine.run_pass(this)
    refuse_by_trace(engine, this, updated)
    return cache


def _naively_repaired(engine: Engine, stale: KVCache, ids: np.ndarray, positions: np.ndarray) -> KVCache:
    cache = _copy(stale)
    cache.token_ids = ids
    this = Pass([Rows.at(cache, positions)])
    this.attend = packed_attention_naive
    engine.run_pass(this)
    return cache


def _alignment(engine: Engine, ids: np.ndarray, stale: KVCache) -> float:
    """Grow one span, delete another, shrink a third; realign the stale rows, recompute from the first span on."""
    cut = len(ids) // 6
    grown = [*ids[:cut], *ids[5:10], *ids[cut + 2 : 3 * cut], *ids[3 * cut + 2 : 5 * cut], ids[1], *ids[5 * cut + 3 :]]
    changed = np.array(grown, np.int64)
    diff = diff_tokens(ids, changed)
    rows = RowMap.of_base(np.arange(len(ids))).realigned(diff.source)
    none = [LayerRotation(())] * engine.shape.layers
    cache = allocate(stale, rows, changed, 0, engine.device)
    gather(cache, rows, [stale])
    turn(cache, rows, none)
    engine.recompute(cache, np.arange(diff.first, len(changed)))
    return deviation(cache, engine.prefill(changed))


def _packed(engine: Engine, ids: np.ndarray, stale: KVCache, changed: np.ndarray, window: np.ndarray) -> float:
    """Texts of several lengths and a repair in one pass, against the same done singly."""
    texts = [ids[:5], ids[: len(ids) // 2], ids]
    together = [engine.new_cache(text, 0) for text in texts]
    repaired = _copy(stale)
    repaired.token_ids = changed
    engine.recompute_many([*((c, np.arange(len(c))) for c in together), (repaired, window)])
    singly = [*(engine.prefill(text) for text in texts), _repaired(engine, stale, changed, window)]
    return max(deviation(one, other) for one, other in zip([*together, repaired], singly, strict=True))
