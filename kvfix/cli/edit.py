"""kvfix edit: repair a document's cache after its file has changed, and report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.cli.options import (
    ENGINE,
    PLANNING,
    QUALITY,
    SERVING,
    WRITING,
    Doc,
    DryRun,
    Measure,
    NoVerify,
    ProbesFile,
    TextFrom,
    Undo,
)
from kvfix.cli.undo import go_back
from kvfix.cli.verb import Run, verb
from kvfix.errors import DocumentError, UsageError

if TYPE_CHECKING:
    from kvfix.config import Settings
    from kvfix.pipeline.plan import EditOptions
    from kvfix.probes import GivenProbe


@verb(
    PLANNING, QUALITY, SERVING, ENGINE, WRITING, example="kvfix edit docs/refunds.md --k 32 --min-mr 0.8 --on-low exact"
)
def edit(
    run: Run,
    doc: Doc,
    text: TextFrom = None,
    probes: ProbesFile = None,
    no_verify: NoVerify = False,
    measure: Measure = False,
    undo: Undo = False,
    dry_run: DryRun = False,
) -> None:
    """Repair a document's cache after its file has changed.

    Recomputes the edited tokens and k rows behind each span, asks questions that the edit answers anew, stores the
    result and reports. The old entry stays until the new one is safe. With --undo, the version before is made the
    newest again instead.
    """
    if undo:
        _refuse({"--text": text, "--probes": probes, "--no-verify": no_verify, "--measure": measure})
        go_back(run, doc, dry_run)
        return
    from dataclasses import replace

    from kvfix.cli.report import report_lines
    from kvfix.probes import default_probes

    given = _given_probes(probes)
    options = planning(run.settings, verify=not no_verify, measure=measure, dry_run=dry_run, probes=given)
    new_text = None if text is None else read_text(text)
    with run.open(read_only=dry_run) as kv, run.writing(kv, "edit", unless=dry_run):
        if probes is None:
            options = replace(options, probes=tuple(default_probes(kv.record(doc).corpus)))
        with run.out.working("loading the model") as say:
            report = kv.repair(doc, options, new_text, say)
    run.out.document(report.to_json())
    if run.out.speaks:
        run.out.show(*report_lines(report, run.out.people.width))


def _refuse(given: dict[str, Any]) -> None:
    """Raise `UsageError` for options that are about a repair."""
    for name, value in given.items():
        if value:
            raise UsageError(f"--undo computes nothing: leave out {name}")


def planning(settings: Settings, **more: Any) -> EditOptions:
    """The settings as the pipeline takes them. Raises `UsageError` before anything is loaded."""
    from kvfix.pipeline.plan import EditOptions

    names = ("selector", "k", "budget", "seed", "query", "strategy", "min_mr", "on_low")
    return EditOptions(**{name: getattr(settings, name) for name in names}, **more)


def read_text(source: str) -> bytes:
    """The bytes of a file, or of standard input. Raises `DocumentError`."""
    try:
        return sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise DocumentError(f"{source}: cannot be read: {error.strerror}") from error


def _given_probes(path: Path | None) -> tuple[GivenProbe, ...]:
    from kvfix.probes import load_probes

    return tuple(load_probes(path)) if path is not None else ()
