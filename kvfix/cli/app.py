"""The application: its verbs, and `main`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvfix
from kvfix.cli.ask import ask
from kvfix.cli.bench import bench
from kvfix.cli.boundary import guarded
from kvfix.cli.build import build
from kvfix.cli.compact import compact
from kvfix.cli.diff import diff
from kvfix.cli.doctor import doctor
from kvfix.cli.edit import edit
from kvfix.cli.fsck import fsck
from kvfix.cli.gc import gc
from kvfix.cli.output import Output, prepare_streams
from kvfix.cli.refresh import refresh
from kvfix.cli.serve import serve
from kvfix.cli.status import status
from kvfix.cli.sync import sync
from kvfix.cli.verb import Shell, open_engine
from kvfix.cli.verify import verify

if TYPE_CHECKING:
    from kvfix.engine import Engine

app = typer.Typer(
    name="kvfix",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    # without a default, typer would import pydantic to make a truth value of a --help that was not given
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvfix {kvfix.__version__}")
        raise typer.Exit


@app.callback(epilog="[dim]Example:[/dim] kvfix build docs && kvfix edit docs/refunds.md")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Print the version.")
    ] = False,
) -> None:
    """Keep precomputed KV caches true to their documents: diff, repair, report."""


for command in (build, diff, edit, sync, refresh, status, ask, verify, gc, compact, fsck, doctor, serve):
    command.join(app)
app.add_typer(bench, name="bench")


@cache
def _command() -> Any:
    """The application as its parser has it: made once, for a daemon parses many times."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None, open_engine: Callable[..., Engine] = open_engine) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    prepare_streams()
    # also for what is wrong before the options are read
    out = Output(
        json="--json" in given, logs="--log-format=json" in given or ("--log-format", "json") in pairwise(given)
    )
    shell = Shell(out, open_engine)
    return guarded(out, lambda: _command().main(given, prog_name="kvfix", standalone_mode=False, obj=shell))
