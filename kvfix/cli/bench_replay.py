"""kvfix bench replay: what kvfix would have done for a repository's own past edits, and what that was worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.options import (
    ENGINE,
    PLANNING,
    PRINTING,
    WALKING,
    Budgets,
    DryRun,
    Git,
    MaxEdits,
    MaxTokens,
    RecordsFile,
    TimeBudget,
    Tried,
)
from kvfix.cli.replay_tables import said
from kvfix.cli.verb import Run, verb
from kvfix.core import DEFAULT_SELECTOR
from kvfix.errors import UsageError

if TYPE_CHECKING:
    from kvfix.bench.replay import ReplayOptions

SHARED = {"seed": PLANNING["seed"], "include": WALKING["include"]}


@verb(ENGINE, PRINTING, SHARED, example="kvfix bench replay --git docs --k 32,adaptive --time-budget 10m")
def replay(
    run: Run,
    git: Git,
    selectors: Tried = DEFAULT_SELECTOR,
    k: Budgets = "32",
    max_edits: MaxEdits = 60,
    max_tokens: MaxTokens = 4096,
    time_budget: TimeBudget = None,
    out: RecordsFile = None,
    dry_run: DryRun = False,
) -> None:
    """Replay past edits of a repository's documents: old text cached, new text repaired, compared with a fresh prefill.

    A seeded sample of commits, merges left out. The repository is only read, and nothing that it says is run. With
    --dry-run no weights are loaded: what the edits are like, and what the cost model would choose.
    """
    from kvfix.bench.history import open_history
    from kvfix.bench.records import Records
    from kvfix.bench.replay import Replay, ReplayOptions, key_of
    from kvfix.bench.replay_summary import summary

    options = ReplayOptions(
        selectors=_names(selectors),
        ks=_budgets(k),
        max_edits=max_edits,
        max_tokens=max_tokens,
        time_budget=None if time_budget is None else words.seconds(time_budget, "--time-budget"),
        seed=run.settings.seed,
        dry_run=dry_run,
    )
    history = open_history(git, run.settings.include, run.settings.seed)
    known = Records(out, key_of, "bench replay")
    with run.out.working("loading the model") as say:
        under_way = Replay(_engine(run, options), history, options, known, say)
        for record in under_way.records():
            run.out.line(record)
    body = summary(under_way)
    run.out.document(body)
    if run.out.speaks:
        run.out.show(*said(body, with_quality=not dry_run))
        if under_way.stopped:
            run.out.warn(under_way.stopped)


def _engine(run: Run, options: ReplayOptions) -> Any:
    """The model, past its gate unless nothing will be computed."""
    engine = run.engine()
    if not options.dry_run:
        from kvfix.engine import run_gate

        engine.gate_report = run_gate(engine)
    return engine


def _names(selectors: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in selectors.split(",")))


def _budgets(text: str) -> tuple[int | str, ...]:
    """`32,adaptive`. Raises `UsageError`."""
    from kvfix.core import ADAPTIVE

    parts = [part.strip() for part in text.split(",")]
    if not all(part == ADAPTIVE or (part.isascii() and part.isdigit()) for part in parts):
        raise UsageError(f"--k {text}: expected whole numbers or {ADAPTIVE}, with commas between them")
    return tuple(dict.fromkeys(part if part == ADAPTIVE else int(part) for part in parts))
