"""All printing: tables and notes for people on stderr, data on stdout, one JSON document where one is asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from kvfix.cli import words
from kvfix.errors import OutputLostError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDE = 160  # columns where no terminal sets them


class Output:
    """What one command prints, and how: for people, quietly, or as JSON.

    Where it `logs`, standard error has one JSON object a line instead of what is for people: `time`, `level`, `event`
    and what belongs to the event.
    """

    def __init__(self, json: bool = False, quiet: bool = False, logs: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self.logs = logs
        self._told = False  # the JSON document that a command ends with
        self._lost = False  # whether standard output cannot be written

    # ---- for people

    @property
    def speaks(self) -> bool:
        """Whether tables and notes are wanted."""
        return not (self.json or self.quiet or self.logs)

    @property
    def draws(self) -> bool:
        """Whether bars are."""
        return self.speaks and sys.stderr.isatty()

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None where there is none."""
        return self.people.width if self.people.is_terminal else None

    @cached_property
    def people(self) -> Console:
        """Standard error."""
        return console(sys.stderr)

    def show(self, *parts: RenderableType, fitted: bool = False) -> None:
        """Print tables and lines; those that are `fitted` to the width already are not looked at again."""
        if self.speaks:
            for part in parts:
                self.people.print(part, soft_wrap=fitted)

    def note(self, line: str) -> None:
        """Say in passing what is going on."""
        self.log("info", "note", message=line)
        if self.speaks:
            self.people.print(words.safe(line), style="dim", soft_wrap=True)

    def warn(self, line: str) -> None:
        """Say what nobody should overlook."""
        self.log("warning", "warning", message=line)
        if self.speaks:
            self.people.print(words.safe(f"warning: {line}"), style="yellow", soft_wrap=True)

    def complain(self, line: str) -> None:
        """Say what went wrong, also where only success is quiet; what a log is to say has been logged."""
        if not (self.json or self.logs):
            self.people.print(words.safe(line), style="red", soft_wrap=True)

    @contextmanager
    def working(self, line: str) -> Iterator[Callable[[str], None]]:
        """A line, and what it may be changed to, that says what is going on; on a terminal only."""
        if not self.draws:
            yield lambda line: None
            return
        with self.people.status(line, spinner="line", spinner_style="dim") as status:
            yield status.update

    # ---- for logs

    def log(self, level: str, event: str, **fields: Any) -> None:
        """Print a line of the log, where one is kept; a quiet one has warnings and errors alone."""
        if self.logs and not (self.quiet and level == "info"):
            from kvfix.store.jsonfile import plain

            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            body = {"time": now, "level": level, "event": event, **fields}
            try:
                print(json.dumps(_rounded(plain(body)), allow_nan=False), file=sys.stderr, flush=True)
            except OSError:
                # a log that cannot be kept is no reason to stop
                _to_nowhere(sys.stderr)

    # ---- data

    def answer(self, text: str) -> None:
        """Print what was asked for, plainly."""
        if not self.json:
            print(text)

    def document(self, body: dict[str, Any]) -> None:
        """Print the command's JSON document, where one is asked for: its only one, or the one behind its lines."""
        self._told = True
        self.line(body)

    def line(self, body: dict[str, Any]) -> None:
        """Print one of the JSON documents that come before a command's last."""
        if self.json:
            from kvfix.store.jsonfile import plain

            self._print_json(_rounded(plain(body)))

    def _print_json(self, body: dict[str, Any]) -> None:
        unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        try:
            print(json.dumps(body, ensure_ascii=not unicode, allow_nan=False))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._give_up(error) from error

    # ---- the end

    def flush(self) -> int:
        """Bring out what is still buffered, and return an exit code; nobody reading it is no failure."""
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            self.hang_up()
        except OSError as error:
            lost = self._give_up(error)
            return self.fail(lost.code, lost.message, lost.exit_code)
        return 0

    def fail(self, code: str, message: str, exit_code: int) -> int:
        """Print the one message of a failure and return its exit code."""
        if self._lost:
            self.people.print(words.safe(f"error: {message}"), style="red", soft_wrap=True)
        elif self.json:
            error = {"code": code, "message": message, "exit_code": exit_code}
            if not self._told:
                self._print_json({"schema": "kvfix.error/1", "error": error})
        else:
            self.complain(f"error: {message}")
        self.log("error", "error", code=code, message=message, exit_code=exit_code)
        return exit_code

    def _give_up(self, error: OSError) -> OutputLostError:
        """Write nothing more to standard output, and say where people look why."""
        self._lost = True
        self.hang_up()
        return OutputLostError(f"cannot write standard output: {error.strerror}")

    def hang_up(self) -> None:
        """Nobody reads standard output any more: let the interpreter's last flush go nowhere."""
        _to_nowhere(sys.stdout)


def prepare_streams() -> None:
    """Have closed streams lead nowhere, characters that a stream cannot show escaped, and libraries draw no bars.

    Their bars would draw into pipes and over ours; whether they do is decided when they are imported.
    """
    os.environ.update(TQDM_DISABLE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def console(stream: TextIO) -> Console:
    """A console without markup; no colour where NO_COLOR is set, room enough where no terminal limits it."""
    from rich.console import Console

    class Steady(Console):
        """Goes silent, instead of ending the process, when nobody reads on."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            _to_nowhere(stream)

    fixed = stream.isatty() or os.environ.get("COLUMNS")
    return Steady(
        file=stream,
        width=None if fixed else WIDE,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
    )


def _to_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _rounded(value: Any, is_ms: bool = False) -> Any:
    """Milliseconds to three decimals: what stands, at any depth, under a name with `_ms`."""
    if isinstance(value, dict):
        return {name: _rounded(item, is_ms or name.endswith("_ms")) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, is_ms) for item in value]
    return round(value, 3) if is_ms and isinstance(value, float) else value
