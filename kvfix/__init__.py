"""kvfix keeps precomputed KV caches true to their documents. The public Python API; nothing else runs at import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfix.api import KVFix
    from kvfix.core import Document, EditSpan, KVCache, RepairPlan, TokenDiff
    from kvfix.engine import Engine
    from kvfix.errors import KVFixError
    from kvfix.pipeline.edit import EditOptions, EditReport
    from kvfix.store import Store

__version__ = "0.1.0"

_HOMES = {
    "KVFix": "kvfix.api",
    "Document": "kvfix.core",
    "EditSpan": "kvfix.core",
    "KVCache": "kvfix.core",
    "RepairPlan": "kvfix.core",
    "TokenDiff": "kvfix.core",
    "Engine": "kvfix.engine",
    "KVFixError": "kvfix.errors",
    "EditOptions": "kvfix.pipeline.edit",
    "EditReport": "kvfix.pipeline.edit",
    "Store": "kvfix.store",
}

__all__ = [
    "Document",
    "EditOptions",
    "EditReport",
    "EditSpan",
    "Engine",
    "KVCache",
    "KVFix",
    "KVFixError",
    "RepairPlan",
    "Store",
    "TokenDiff",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import kvfix` loads neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvfix' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
