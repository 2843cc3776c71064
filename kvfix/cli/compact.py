"""kvfix compact: fold patches into new bases now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix.cli import words
from kvfix.cli.options import WRITING, Below, DryRun
from kvfix.cli.verb import Run, verb
from kvfix.errors import StoreDamagedError

if TYPE_CHECKING:
    from rich.text import Text

    from kvfix.pipeline.compact import Compacted

STYLES = {"compacted": "green", "planned": "cyan"}


@verb(WRITING, example="kvfix compact docs --keep 0")
def compact(run: Run, path: Below = None, dry_run: DryRun = False) -> int:
    """Fold the patches of each document into a new base, as commits do in time.

    Loading gets quicker. What previous versions still need stays, so that space is only freed where they go: by later
    changes, or at once with --keep 0.
    """
    from kvfix.pipeline.compact import compact as folding
    from kvfix.pipeline.compact import totals

    with run.open(read_only=dry_run) as kv, run.writing(kv, "compact", unless=dry_run):
        before = kv.store.stored_bytes()
        done = []
        for one in folding(kv.store, kv.select(path), dry_run):
            done.append(one)
            _show(run, one)
        freed = None if dry_run else before - kv.store.stored_bytes()
    sums = totals(done)
    documents = [one.to_json() for one in done]
    run.out.document({"schema": "kvfix.compact/1", "documents": documents, "totals": sums | {"freed_bytes": freed}})
    run.out.show(_summary(sums, freed))
    return StoreDamagedError.exit_code if sums["failed"] else 0


def _show(run: Run, one: Compacted) -> None:
    if one.outcome == "failed":
        run.out.complain(f"failed  {words.visible(one.previous.doc_id)}: {one.reason}")
    elif one.outcome != "unchanged":
        run.out.show(_line(one))


def _line(one: Compacted) -> Text:
    from rich.text import Text

    old = one.previous
    line = Text(f"{one.outcome:<10}", STYLES[one.outcome])
    line.append(f"{words.visible(old.doc_id)}  ", "default")
    after = f" → {words.size(one.record.stored_bytes)}" if one.record else ""
    line.append(f"{words.count(old.num_patches, 'patch', 'patches')}, {words.size(old.stored_bytes)}{after}", "dim")
    return line


def _summary(sums: dict[str, int], freed: int | None) -> str:
    said = [f"{sums[name]:,} {name}" for name in ("compacted", "planned", "unchanged", "failed") if sums[name]]
    line = f"{words.count(sums['documents'], 'document')}: {', '.join(said) or 'nothing to do'}"
    if not freed:
        return line
    if freed > 0:
        return f"{line}; {words.size(freed)} freed"
    return f"{line}; {words.size(-freed)} more for now: previous versions keep what they need (see --keep)"
