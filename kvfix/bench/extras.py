"""Libraries that only studies need."""

from __future__ import annotations

import importlib
from typing import Any

from kvfix.errors import UsageError


def extra(name: str) -> Any:
    """A module of the extra `bench`. Raises `UsageError`, which says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise UsageError(f"this needs {library}, which is not installed: pip install 'kvfix[bench]'") from error
