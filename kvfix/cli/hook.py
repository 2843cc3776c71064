"""The command that a pass ends with: told what has changed, never a shell's, and no reason for the pass to fail."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfix.errors import UsageError


@dataclass(frozen=True)
class Ended:
    """How a hook ended; no exit status where it could not be run, a negative one where a signal ended it."""

    exit_status: int | None
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def parse(command: str) -> list[str]:
    """The command's words. Raises `UsageError`."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--hook {command}: {error}") from error
    if not words:
        raise UsageError("--hook: the command is empty")
    return words


def run(words: Sequence[str], names: Sequence[str]) -> Ended:
    """Run a hook with the names on its standard input, one a line.

    What it prints goes to standard error, for standard output may be somebody's JSON. A name with a line break in
    it is not told.
    """
    told = [name for name in names if len(name.splitlines()) == 1]
    sys.stderr.flush()
    try:
        done = subprocess.run(
            words, input="".join(f"{name}\n" for name in told).encode(), stdout=sys.stderr.fileno(), check=False
        )
    except (OSError, ValueError) as error:
        return Ended(None, f"the hook could not be run: {error}")
    if done.returncode:
        return Ended(done.returncode, f"the hook ended with exit status {done.returncode}")
    left_out = len(names) - len(told)
    return Ended(0, f"{left_out} names with line breaks were not told to the hook" if left_out else None)
