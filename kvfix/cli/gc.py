"""kvfix gc: remove what interrupted commits, removed documents and previous versions leave behind."""

from __future__ import annotations

from kvfix.cli import words
from kvfix.cli.options import WRITING, DryRun, MaxSize, MinAge
from kvfix.cli.verb import Run, verb


@verb(WRITING, example="kvfix gc --min-age 10m --max-size 20GB")
def gc(run: Run, min_age: MinAge = "1h", max_size: MaxSize = None, dry_run: DryRun = False) -> None:
    """Remove files of the store that nothing refers to.

    With --keep, or a setting of that name, also previous versions beyond that number. With --max-size, then previous
    versions of all documents, the oldest first, until the rest fits; never a document's newest version.
    """
    seconds = words.seconds(min_age, "--min-age")
    most = None if max_size is None else words.num_bytes(max_size, "--max-size")
    with run.open(read_only=dry_run) as kv, run.writing(kv, "gc", unless=dry_run):
        removed = kv.store.gc(seconds, most, dry_run)
    run.out.document(
        {
            "schema": "kvfix.gc/1",
            "dry_run": dry_run,
            "num_files": removed.num_files,
            "removed_bytes": removed.bytes,
            "num_versions": removed.num_versions,
            "stored_bytes": removed.stored_bytes,
            "over_bytes": None if most is None else removed.over_bytes,
        }
    )
    versions = f", {words.count(removed.num_versions, 'previous version')}" if removed.num_versions else ""
    would = "would be removed" if dry_run else "removed"
    run.out.show(f"{words.count(removed.num_files, 'file')} {would}, {words.size(removed.bytes)}{versions}")
    if removed.over_bytes:
        run.out.warn(
            f"{words.size(removed.stored_bytes)} are left, {words.size(removed.over_bytes)} more than {max_size}: "
            "newest versions of documents, and files younger than --min-age"
        )
