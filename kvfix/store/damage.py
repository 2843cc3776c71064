"""The error that names one damaged file of a store."""

from __future__ import annotations

from pathlib import Path

from kvfix.errors import StoreDamagedError


class DamagedFileError(StoreDamagedError):
    """A file of the store is not as it was written."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"{path} is damaged: {reason}. List what it affects with kvfix verify, restore it with kvfix build --force."
        )
