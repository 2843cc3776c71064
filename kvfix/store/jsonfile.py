"""JSON files in one canonical spelling, so that every changed byte shows."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from kvfix.store import files
from kvfix.store.damage import DamagedFileError
from kvfix.store.layout import Layout


def encode(body: dict[str, Any]) -> bytes:
    """The canonical spelling: sorted keys, ASCII, no NaN."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """`value` in JSON's own types: numpy scalars as numbers, tuples as lists, what is not finite as None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def decode(content: bytes, path: Path) -> dict[str, Any]:
    """A canonical file's object; DamagedFileError if it is anything else."""
    try:
        body = json.loads(content)
        if isinstance(body, dict) and encode(body) == content:
            return body
    except (ValueError, RecursionError):
        pass
    raise DamagedFileError(path, "it is not the JSON that was written")


def digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(encode(body)).hexdigest()


def save_sealed(layout: Layout, path: Path, body: dict[str, Any]) -> None:
    """Write `body` with its own checksum, durably and atomically."""
    body = plain(body)
    files.write_bytes(layout, path, encode({"body": body, "sha256": digest(body)}))


def load_sealed(layout: Layout, path: Path) -> dict[str, Any] | None:
    """A sealed file's body, None if there is no such file; DamagedFileError if a byte has changed."""
    try:
        sealed = decode(files.read_bytes(layout, path), path)
    except FileNotFoundError:
        return None
    body = sealed.get("body")
    if not isinstance(body, dict) or sealed.get("sha256") != digest(body) or len(sealed) != 2:
        raise DamagedFileError(path, "its checksum differs")
    return body
