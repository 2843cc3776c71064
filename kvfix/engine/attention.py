"""The attention function that transformers calls during a pass: it masks by position and reads whole layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AttentionInterface

from kvfix.engine.cache import Rows
from kvfix.errors import UnsupportedModelError
from kvfix.ops import Pack, packed_attention

NAME = "kvfix"

# arguments that models hand on and that a pass without dropout, at given positions, may ignore
HARMLESS = {
    "attention_mask",
    "cache",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "head_mask",
    "is_causal",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass
class Pass:
    """One forward pass: whose rows it computes, and which layers asked for attention with which window."""

    groups: list[Rows]
    attended: dict[int, int | None] = field(default_factory=dict)  # layer → window
    attend = staticmethod(packed_attention)
    backend: ClassVar[str | None] = None  # of the ops, see `kvfix.ops.backend.dispatch`

    @cached_property
    def pack(self) -> Pack:
        """The rows as the ops take them."""
        return Pack([rows.part for rows in self.groups])

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions `[1, M]` of all rows."""
        ids = np.concatenate([rows.token_ids for rows in self.groups])
        positions = np.concatenate([rows.positions for rows in self.groups])
        return torch.from_numpy(ids)[None].to(device), torch.from_numpy(positions)[None].to(device)


_current: ContextVar[Pass] = ContextVar("kvfix_pass")


@contextmanager
def running(this: Pass) -> Iterator[Pass]:
    """Make `this` the pass that the attention function serves."""
    token = _current.set(this)
    try:
        yield this
    finally:
        _current.reset(token)


def register() -> None:
    """Make the function known to transformers; models ask for it by `NAME`, and build no mask of their own."""
    AttentionInterface.register(NAME, attention)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, M, D]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention output `[1, M, Hq, Dv]` of the current pass's rows over their own documents' layers."""
    refuse_unknown(kwargs)
    this, layer = _current.get(), int(module.layer_idx)  # type: ignore[arg-type]
    this.attended[layer] = sliding_window
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules: dict[str, Any] = {"scaling": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    # contiguous, as transformers' own functions leave it: some models take a view of it
    return this.attend(query[0], this.pack, layer, **rules).contiguous()[None], None


def refuse_unknown(kwargs: dict[str, object]) -> None:
    """Raise `UnsupportedModelError` for an argument that might change the scores."""
    for name, value in kwargs.items():
        if name == "is_causal" and value is False:
            raise UnsupportedModelError("the model asks for attention that is not causal (is_causal=False)")
        if value is not None and value is not False and name not in HARMLESS:
            raise UnsupportedModelError(f"the model's attention takes an argument that kvfix does not know: {name}")
