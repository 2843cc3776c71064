"""kvfix diff: what has changed between the cached and the present text, and what a repair would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.cli.edit import planning, read_text
from kvfix.cli.options import ENGINE, PLANNING, READING, Doc, TextFrom
from kvfix.cli.verb import Run, verb

if TYPE_CHECKING:
    from kvfix.pipeline.report import EditReport


@verb(PLANNING, ENGINE, READING, example="kvfix diff docs/refunds.md")
def diff(run: Run, doc: Doc, text: TextFrom = None) -> None:
    """Show token by token what has changed since a document was cached, and what a repair would cost."""
    from kvfix.cli.report import diff_lines

    options = planning(run.settings, dry_run=True)
    new_text = None if text is None else read_text(text)
    with run.open(read_only=True) as kv:
        with run.out.working("loading the tokenizer"):
            report = kv.repair(doc, options, new_text)
        run.out.document(_to_json(report))
        if run.out.speaks:
            run.out.show(*diff_lines(report))


def _to_json(report: EditReport) -> dict[str, Any]:
    whole = report.to_json()
    tokens = whole["tokens"]
    return {
        "schema": "kvfix.diff/1",
        **{name: whole[name] for name in ("doc", "corpus", "outcome", "spans", "length_preserving")},
        "tokens": tokens and {name: tokens[name] for name in ("old", "new", "span")},
        **{name: whole[name] for name in ("cost", "strategy")},
        "reason": report.plan.reason if report.plan else report.reason,
    }
