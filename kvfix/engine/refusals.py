"""Models that are refused without arithmetic: by what their config says, or by what their layers ask for."""

from __future__ import annotations

from typing import Any

from kvfix.engine.attention import Pass
from kvfix.engine.engine import Engine
from kvfix.errors import UnsupportedModelError

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# settings that only architectures with a running state have
RECURRENT_MARKS = (
    "ssm_cfg",
    "mamba_d_state",
    "state_size",
    "attn_layer_period",
    "rwkv_hidden_size",
    "attention_hidden_size",
)


def refuse_by_config(engine: Engine) -> None:
    """Raise for architectures without plain per-token keys and values, by what the config says."""
    config, name = engine.config.get_text_config(), engine.name
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: an encoder-decoder model; kvfix repairs decoder-only models")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name}: multi-head latent attention keeps no plain keys and values per head")
    given = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    for layer_type in given:
        if layer_type not in KNOWN_LAYER_TYPES:
            raise UnsupportedModelError(
                f"{name}: layers of type {layer_type!r} keep no per-token keys and values to repair"
            )
    for mark in RECURRENT_MARKS:
        if getattr(config, mark, None):
            raise UnsupportedModelError(
                f"{name}: a recurrent or hybrid model ({mark}); its state has no rows to repair"
            )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name}: layers that share their keys and values are not supported")


def _expected_windows(config: Any, num_layers: int) -> list[int | None]:
    """Each layer's window by the config."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * num_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def refuse_by_trace(engine: Engine, this: Pass, updated: list[int]) -> None:
    """Raise when the model does not store and attend once a layer, or hides a window from its attention."""
    layers = list(range(engine.shape.layers))
    if sorted(updated) != layers or sorted(this.attended) != layers:
        raise UnsupportedModelError(
            f"{engine.name}: {len(layers)} layers, but {len(set(updated))} stored keys and {len(this.attended)} asked "
            "kvfix for attention; layers without their own keys and values cannot be repaired"
        )
    expected = _expected_windows(engine.config.get_text_config(), len(layers))
    for layer, window in enumerate(expected):
        if this.attended[layer] != window:
            raise UnsupportedModelError(
                f"{engine.name}: layer {layer} should see a window of {window} by its config, "
                f"but asks for {this.attended[layer]}"
            )
