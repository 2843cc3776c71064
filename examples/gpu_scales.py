"""How large `gpu_check.py` works: on a GPU in the shapes of well-known models, and on a CPU as small as can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPE_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA = SHAPE_8B | {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}
QWEN = SHAPE_8B | {"intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960}
MISTRAL = SHAPE_8B | {"intermediate_size": 14336, "vocab_size": 32768, "max_position_embeddings": 32768}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
TINY = SMALL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}

# key and value dim, query heads for each key head, what a model says of its attention
Variant = tuple[tuple[int, int], int, dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """What is tried and how large."""

    device: str
    dtype: torch.dtype  # of what is timed
    variants: tuple[Variant, ...]  # of attention, compared with the twin
    documents: tuple[tuple[int, int], ...]  # rows and keys of each, packed in those comparisons
    small: dict[str, Any]  # sizes of the model whose passes are compared
    num_tokens: int  # of the text that they are compared on
    models: dict[str, tuple[str, dict[str, Any]]]  # name → model type and sizes, repaired and timed
    contexts: tuple[int, ...]
    heads: tuple[int, int, int, int]  # of the timed attention: layers, query heads, key heads, dim
    keys: int
    tilings: tuple[tuple[int, int, int, int], ...]  # block rows, block keys, warps, stages: tried beside the chosen one
    programs: tuple[int, ...]  # for each processor
    copied_bytes: int
    repeats: int  # of an op
    rounds: int  # of a repair
    packed: tuple[int, ...]  # documents of one pass
    sets: int  # of rows, on which a recorded pass is compared
    k: int = 32
    span: int = 3


FULL = Scale(
    device="cuda",
    dtype=torch.bfloat16,
    variants=(
        ((128, 128), 4, {}),
        ((64, 64), 1, {"window": 40}),
        ((256, 256), 2, {"softcap": 50.0, "window": 40}),
        ((80, 80), 7, {"sinks": True}),
        ((96, 24), 3, {"softcap": 5.0, "hidden": True}),
    ),
    documents=((1, 40), (35, 111), (13, 13), (63, 1500)),
    small=SMALL,
    num_tokens=700,
    models={
        "Llama-3.1-8B": ("llama", LLAMA | {"rope_parameters": LLAMA3_ROPE}),
        "Qwen3-8B": ("qwen3", QWEN | {"num_hidden_layers": 36, "head_dim": 128}),
        "Mistral-7B": ("mistral", MISTRAL | {"sliding_window": None}),
    },
    contexts=(4096, 8192),
    heads=(32, 32, 8, 128),
    keys=8192,
    tilings=((64, 64, 4, 2), (64, 128, 4, 2), (64, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 2), (16, 64, 4, 3)),
    programs=(1, 4),
    copied_bytes=4 * 2**30,
    repeats=20,
    rounds=5,
    packed=(1, 4, 16, 64),
    sets=3,
)
SMOKE = Scale(
    device="cpu",
    dtype=torch.float32,
    variants=(((16, 16), 2, {}), ((24, 16), 1, {"softcap": 5.0, "hidden": True, "window": 9, "sinks": True})),
    documents=((1, 9), (7, 33)),
    small=TINY,
    num_tokens=30,
    models={"tiny": ("llama", TINY)},
    contexts=(40,),
    heads=(1, 2, 1, 16),
    keys=40,
    tilings=((16, 16, 4, 2),),
    programs=(),
    copied_bytes=2**20,
    repeats=1,
    rounds=1,
    packed=(1, 2),
    sets=1,
    k=4,
)
