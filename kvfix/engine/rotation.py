"""How a model's keys turn with position, found by trial: per layer, not believed from the config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvfix.core import KVCache, LayerRotation, Run
from kvfix.engine.cache import Rows
from kvfix.engine.engine import Engine
from kvfix.ops import rotate_keys

SHIFT = 7
KEY_TOLERANCE = 1e-5  # of the layer's largest key, fp32


def find_rotations(
    engine: Engine, ids: np.ndarray, noise: float
) -> tuple[Sequence[LayerRotation] | None, dict[str, Any]]:
    """Each layer's rotation, and the finding JSON-ready (`rotations_from` reads it back).

    The same tokens are prefilled at positions 0… and 7…; every layer's values must agree and its keys must agree
    after one of: no turn, or a half-split or interleaved turn by one of the model's own frequency sets. None where
    some layer fits nothing (absolute positions): then rows cannot be moved.
    """
    here, moved = engine.prefill(ids, room=0), _prefill_at(engine, ids, SHIFT)
    candidates = [LayerRotation(())] + [
        LayerRotation(tuple(freqs.tolist()), interleaved)
        for freqs in _frequency_sets(engine.model)
        for interleaved in (False, True)
    ]
    chosen, errors = [], []
    for layer in range(here.num_layers):
        error, best = min((_misfit(here, moved, layer, c), n) for n, c in enumerate(candidates))
        chosen.append(best)
        errors.append(error)
    tolerance = KEY_TOLERANCE if engine.dtype == torch.float32 else max(2.0**-6, 2 * noise)
    drift = max(_value_drift(here, moved, layer) for layer in range(here.num_layers))
    finding: dict[str, Any] = {"shift": SHIFT, "key_error": max(errors), "value_error": drift, "tolerance": tolerance}
    if not max(errors) <= tolerance or not drift <= 10 * tolerance:
        reason = "keys do not simply turn with position: rows that move need a re-prefill of what follows"
        return None, {**finding, "movable": False, "reason": reason}
    used = sorted(set(chosen))
    sets = [{"inv_freq": list(candidates[n].inv_freq), "interleaved": candidates[n].interleaved} for n in used]
    finding |= {"movable": True, "sets": sets, "layers": [used.index(n) for n in chosen]}
    return [candidates[n] for n in chosen], finding


def rotations_from(finding: dict[str, Any]) -> Sequence[LayerRotation] | None:
    """The rotations of a stored finding."""
    if not finding["movable"]:
        return None
    sets = [LayerRotation(tuple(entry["inv_freq"]), entry["interleaved"]) for entry in finding["sets"]]
    return [sets[index] for index in finding["layers"]]


def _frequency_sets(model: Any) -> list[torch.Tensor]:
    """The distinct frequency buffers of the model's rotary modules, as they stand after a short text."""
    sets: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        leaf = name.rsplit(".", 1)[-1]
        if not leaf.endswith("inv_freq") or "original" in leaf or buffer.ndim != 1:
            continue
        freqs = buffer.detach().float().cpu()
        if not any(freqs.shape == known.shape and torch.equal(freqs, known) for known in sets):
            sets.append(freqs)
    return sets


def _prefill_at(engine: Engine, ids: np.ndarray, shift: int) -> KVCache:
    cache = engine.new_cache(ids, 0)
    slots = np.arange(len(ids))
    engine.compute([Rows(cache, cache.token_ids, slots + shift, slots, torch.from_numpy(slots + shift))])
    return cache


def _misfit(here: KVCache, moved: KVCache, layer: int, rotation: LayerRotation) -> float:
    """Largest key error of a layer after the turn, relative to max(1, its largest key)."""
    keys, target = here.layer(layer)[0].float().clone(), moved.layer(layer)[0].float()
    if 2 * len(rotation.inv_freq) > keys.shape[-1]:
        return float("inf")
    rotate_keys(keys[None], [Run(0, keys.shape[1], 0, 0, SHIFT)], [rotation])
    return float((keys - target).abs().max()) / max(1.0, float(target.abs().max()))


def _value_drift(here: KVCache, moved: KVCache, layer: int) -> float:
    values, target = here.layer(layer)[1].float(), moved.layer(layer)[1].float()
    return float((values - target).abs().max()) / max(1.0, float(target.abs().max()))
