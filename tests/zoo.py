"""Tiny random models of many architectures, saved as a person would have them: config, safetensors, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=128)
LONG = rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.5 * i for i in range(8)],
    original_max_position_embeddings=256,
    factor=2.0,
)

# name → (model type, settings); one line an architecture or a kind of position
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3": ("llama", LLAMA3),
    "llama-yarn": ("llama", YARN),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=2.0)),
    "llama-longrope": ("llama", LONG),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 40, "head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3-partial": ("phi3", {**rope("default", partial_rotary_factor=0.5), "partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 40, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "granite": ("granite", {"attention_multiplier": 0.25, "logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "olmo2": ("olmo2", {}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm-interleaved": ("glm", {"head_dim": 16, "num_key_value_heads": 2}),
    "gpt2": ("gpt2", {}),
}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"state_size": 8}),
    "deepseek-mla": (
        "deepseek_v3",
        {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    ),
    "qwen3-next-hybrid": ("qwen3_next", {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}),
    "llama4-chunked": ("llama4_text", {"attention_chunk_size": 32}),
}


def save_model(folder: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Make the zoo's model `name` in `folder` (once) and return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").is_file():
        return folder
    kind, settings = {**ZOO, **REFUSED}[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **settings, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def spread(model: Any) -> None:
    """Initial weights of 0.02 make attention uniform; larger ones make a wrong mask or rotation visible."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6.0)
            elif "bias" in name or "sinks" in name:
                parameter.normal_()


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a few merges and chat marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {mark: index for index, mark in enumerate(marks)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "a"), ("o", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=marks[2:],
    ).save_pretrained(folder)
