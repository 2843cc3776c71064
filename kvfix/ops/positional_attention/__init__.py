"""Attention of query rows at arbitrary positions, masked by position."""

from kvfix.ops.positional_attention.blocked import positional_attention

__all__ = ["positional_attention"]
