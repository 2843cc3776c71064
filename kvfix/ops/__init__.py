"""Hot tensor operations, tensors in and out: PyTorch, a slow and obvious twin in `naive.py`, and a Triton kernel."""

from kvfix.ops.kv_deviation import kv_deviation
from kvfix.ops.packing import Pack, Part
from kvfix.ops.positional_attention import packed_attention, positional_attention
from kvfix.ops.rotate_keys import rotate_keys
from kvfix.ops.scatter_kv import scatter_kv

__all__ = ["Pack", "Part", "kv_deviation", "packed_attention", "positional_attention", "rotate_keys", "scatter_kv"]
