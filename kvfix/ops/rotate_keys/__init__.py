"""Turns post-RoPE keys from the position they were computed at to another one."""

from kvfix.ops.rotate_keys.runs import rotate_keys

__all__ = ["rotate_keys"]
