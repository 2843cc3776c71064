"""kvfix gc: remove what interrupted commits and removed documents leave behind."""

from __future__ import annotations

from kvfix.cli import words
from kvfix.cli.options import WRITING, MinAge
from kvfix.cli.verb import Run, verb


@verb(WRITING, example="kvfix gc --min-age 10m")
def gc(run: Run, min_age: MinAge = "1h") -> None:
    """Remove files of the store that nothing refers to."""
    seconds = words.seconds(min_age, "--min-age")
    with run.open() as kv, run.writing(kv, "gc"):
        removed = kv.store.gc(seconds)
    run.out.document({"schema": "kvfix.gc/1", "num_files": removed.num_files, "removed_bytes": removed.bytes})
    run.out.show(f"{words.count(removed.num_files, 'file')} removed, {words.size(removed.bytes)}")
