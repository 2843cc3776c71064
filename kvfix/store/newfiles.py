"""The files that one commit has written: taken back if it fails. What a killed one leaves is for gc."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from kvfix.errors import KVFixError
from kvfix.store.layout import Layout
from kvfix.store.manifest import Manifest


class NewFiles:
    """Entered before a commit, left after it; the caller holds the writer lock."""

    def __init__(self, layout: Layout, manifest: Manifest) -> None:
        self._layout = layout
        self._manifest = manifest
        self._paths: list[Path] = []

    def noted(self, final: Path) -> Path:
        """A name that is about to be given; one that is there already may be another version's, and stays."""
        if not final.exists():
            self._paths.append(final)
        return final

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._paths:
            with contextlib.suppress(KVFixError, OSError):
                self._take_back()

    def _take_back(self) -> None:
        """Remove them, unless the transaction was done before the failure."""
        known = {self._layout.record(record.record_id) for record in self._manifest.versions()}
        if known.isdisjoint(self._paths):
            # the record first: one without its segments would look like damage to a rebuild
            for path in reversed(self._paths):
                path.unlink(missing_ok=True)
