"""Where things lie in a store directory. Every path is made of fixed names and hex digests only."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from kvfix.errors import StoreDamagedError
from kvfix.store.damage import DamagedFileError

DIRECTORIES = ("objects", "records", "models", "gates", "tmp")
DIGEST = re.compile(r"[0-9a-f]{64}")
FINGERPRINT = re.compile(r"[0-9a-f]{16}")


def is_digest(text: object) -> bool:
    """Whether `text` is a whole sha256 in hex."""
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None


@dataclass(frozen=True)
class Layout:
    """The paths of one store; names read from files are checked before they become part of one."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.sqlite"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def holder(self) -> Path:
        return self.root / "lock.holder"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def object(self, digest: str) -> Path:
        """An immutable segment, by the sha256 of its content."""
        return self.root / "objects" / self._checked(digest, DIGEST)[:2] / f"{digest}.safetensors"

    def record(self, digest: str) -> Path:
        """An immutable version record, by the sha256 of its content."""
        return self.root / "records" / self._checked(digest, DIGEST)[:2] / f"{digest}.json"

    def model(self, fingerprint: str) -> Path:
        return self.root / "models" / f"{self._checked(fingerprint, FINGERPRINT)}.json"

    def gate(self, fingerprint: str, backend: str) -> Path:
        """A gate report; the backend's name goes in as a digest, for it may hold any character."""
        name = hashlib.sha256(backend.encode()).hexdigest()[:16]
        return self.root / "gates" / f"{self._checked(fingerprint, FINGERPRINT)}-{name}.json"

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _checked(self, name: str, pattern: re.Pattern[str]) -> str:
        if not isinstance(name, str) or not pattern.fullmatch(name):
            raise StoreDamagedError(f"{self.root}: {name!r} is no name of a stored file. Run: kvfix verify")
        return name

    def refuse_symlinks(self, path: Path) -> None:
        """Raise DamagedFileError if `path`, or a directory between it and the root, is a symbolic link."""
        for part in (path, *path.parents):
            if part == self.root:
                return
            try:
                mode = os.lstat(part).st_mode
            except OSError:
                continue
            if stat.S_ISLNK(mode):
                raise DamagedFileError(part, "it is a symbolic link, which kvfix never makes")
