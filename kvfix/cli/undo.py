"""kvfix edit --undo: back to the version before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix.cli import words

if TYPE_CHECKING:
    from kvfix.cli.verb import Run


def go_back(run: Run, doc: str, dry_run: bool) -> None:
    """Restore the version before, and say so; no model is loaded."""
    with run.open(read_only=dry_run) as kv, run.writing(kv, "edit", unless=dry_run):
        done = kv.undo(doc, dry_run)
    run.out.document(done.to_json())
    if run.out.speaks:
        from rich.text import Text

        line = Text(words.visible(done.previous.doc_id), "bold").append("  ")
        line.append(done.outcome, "green" if done.record else "cyan")
        if done.record:
            line.append(f"  version {done.previous.version} → {done.record.version}", "default not bold")
        run.out.show(line.append(f"  ({done.reason})", "dim not bold"))
        for warning in done.warnings:
            run.out.warn(warning)
