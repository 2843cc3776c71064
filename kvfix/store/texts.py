"""Source texts beside the rows: a base keeps the text, a patch only what its text does not share with the last one."""

from __future__ import annotations

import zlib
from typing import Any

WINDOW_BYTES = 32 << 10  # as far as zlib looks back
MAX_TEXT_BYTES = 1 << 30


def pack(text: str, previous: str | None) -> bytes:
    """`text` compressed, the end of the previous version's text serving as the dictionary."""
    packer = zlib.compressobj(9, **_dictionary(previous))
    return packer.compress(text.encode()) + packer.flush()


def unpack(packed: bytes, previous: str | None) -> str:
    """The text again; ValueError if the bytes are not what `pack` made beside this previous text."""
    unpacker = zlib.decompressobj(**_dictionary(previous))
    try:
        content = unpacker.decompress(packed, MAX_TEXT_BYTES)
    except zlib.error as error:
        raise ValueError(f"its text cannot be unpacked ({error})") from error
    if not unpacker.eof:
        raise ValueError("its text is cut short")
    return content.decode()


def _dictionary(previous: str | None) -> dict[str, Any]:
    return {"zdict": previous.encode()[-WINDOW_BYTES:]} if previous else {}
