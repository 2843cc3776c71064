"""kvfix fsck: the whole store, its manifest first of all, and a new manifest where it needs one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.options import LOCKING, DryRun, Rebuild
from kvfix.cli.verb import Run, verb
from kvfix.errors import StoreDamagedError, UsageError

if TYPE_CHECKING:
    from kvfix.store import Damage, Loss, Rebuilt, VersionRecord

MANIFEST = "manifest.sqlite"


@verb(LOCKING, example="kvfix fsck --rebuild")
def fsck(run: Run, rebuild: Rebuild = False, dry_run: DryRun = False) -> int:
    """Check the manifest, the records and every stored byte; restore the manifest.

    With --rebuild, the manifest is made anew from the version records, in whatever state it is, and the old one kept
    beside it. Of each document the newest version that is whole is taken.
    """
    if dry_run and not rebuild:
        raise UsageError("--dry-run: fsck without --rebuild changes nothing")
    return _rebuild(run, dry_run) if rebuild else _check(run)


def _check(run: Run) -> int:
    found, unlisted = _look(run)
    listed = [{"doc": record.doc_id, "corpus": record.corpus, "version": record.version} for record in unlisted]
    _document(run, not found, found, listed, None)
    for damage in found:
        run.out.complain(f"damaged  {_named(damage)}")
    for record in unlisted:
        run.out.warn(
            f"{record.doc_id}: version {record.version} is whole but not in the manifest (a change that was "
            "interrupted, or lost): kvfix fsck --rebuild takes it in, kvfix gc removes it"
        )
    if found:
        _hints(run, found)
        return StoreDamagedError.exit_code
    run.out.show("the store is as it was written")
    return 0


def _look(run: Run) -> tuple[list[Damage], list[VersionRecord]]:
    """All damage; a manifest that cannot even be opened is the first."""
    from kvfix.store import Damage

    try:
        with run.open(read_only=True) as kv, run.out.working("reading the store"):
            return kv.store.verify(), kv.store.unlisted()
    except StoreDamagedError as error:
        return [Damage(None, None, None, MANIFEST, error.message)], []


def _hints(run: Run, found: Sequence[Damage]) -> None:
    if any(damage.path == MANIFEST for damage in found):
        run.out.show("the manifest can be made anew from the records: kvfix fsck --rebuild")
    if any(damage.path != MANIFEST and damage.doc for damage in found):
        run.out.show("damaged documents can be computed again: kvfix build --force PATH")


def _rebuild(run: Run, dry_run: bool) -> int:
    from kvfix.store import Store

    with run.out.working("reading the store"):
        done = Store.rebuild(run.settings.store, dry_run, run.settings.lock_timeout)
    body = {
        "dry_run": dry_run,
        "num_documents": done.num_documents,
        "num_versions": done.num_versions,
        "set_aside": done.set_aside,
        "losses": [asdict(loss) for loss in done.losses],
    }
    _document(run, not done.losses, done.damages, [], body)
    for damage in done.damages:
        run.out.complain(f"left out  {_named(damage)}")
    for loss in done.losses:
        run.out.complain(f"lost  {_lost(loss)}")
    run.out.show(_summary(done, dry_run))
    return StoreDamagedError.exit_code if done.losses else 0


def _document(
    run: Run, ok: bool, damages: Sequence[Damage], unlisted: list[dict[str, Any]], rebuilt: dict[str, Any] | None
) -> None:
    run.out.document(
        {
            "schema": "kvfix.fsck/1",
            "ok": ok,
            "damages": [asdict(damage) for damage in damages],
            "unlisted": unlisted,
            "rebuilt": rebuilt,
        }
    )


def _named(damage: Damage) -> str:
    whose = f"; {damage.doc}, version {damage.version}" if damage.doc is not None else ""
    return f"{damage.path}: {damage.what}{whose}"


def _lost(loss: Loss) -> str:
    if loss.doc is None:
        return "a document whose record cannot be read at all, unless that was a previous version"
    if loss.restored is None:
        return f"{loss.doc}: version {loss.version}, and no other is whole; build it again"
    return f"{loss.doc}: version {loss.version}; version {loss.restored} stands in its place"


def _summary(done: Rebuilt, dry_run: bool) -> str:
    what = (
        f"{words.count(done.num_documents, 'document')} in {words.count(done.num_versions, 'version')} "
        f"{'can be read' if dry_run else 'read'} back from the records"
    )
    return f"{what}; the old manifest is kept as {done.set_aside}" if done.set_aside else what
