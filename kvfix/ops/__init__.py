"""Hot tensor operations, tensors in and out; each keeps a slow, obvious twin in its `naive.py`."""

from kvfix.ops.positional_attention import positional_attention
from kvfix.ops.rotate_keys import rotate_keys

__all__ = ["positional_attention", "rotate_keys"]
