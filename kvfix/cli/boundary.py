"""The error boundary: whatever a command raises becomes one message, or one JSON document, and an exit code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from kvfix.cli.output import Output
from kvfix.errors import KVFixError, UsageError, first_line

UNEXPECTED = 1
# typer carries click inside or beside it, by version: its errors are known by their common ground
CommandLineError: Any = typer.BadParameter.__mro__[2]


class Interrupted(BaseException):
    """A signal asked the process to end; raised so that locks and temporary files are released on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def guarded(out: Output, command: Callable[[], Any]) -> int:
    """Run a command; its exit code. Nothing is raised."""
    code = _guarded(out, command)
    return out.flush() or code


def _guarded(out: Output, command: Callable[[], Any]) -> int:
    try:
        with _interruptible():
            code = command()
    except CommandLineError as error:
        return _usage(out, error)
    except KVFixError as error:
        return out.fail(error.code, error.message, error.exit_code)
    except (Interrupted, KeyboardInterrupt) as error:
        return out.fail("interrupted", str(error) or "interrupted", getattr(error, "exit_code", 130))
    except typer.Abort:
        return out.fail("interrupted", "interrupted", 130)
    except (BrokenPipeError, SystemExit):
        # typer and rich end the process when nobody reads standard output any more
        out.hang_up()
        return 0
    except Exception as error:
        return _unexpected(out, error)
    return code if isinstance(code, int) else 0


def _usage(out: Output, error: Any) -> int:
    """What click and typer find wrong, with the way to the help of the verb at hand."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "kvfix"
    message = " ".join(error.format_message().split())
    return out.fail(UsageError.code, f"{message.rstrip('.')}. See: {path} --help", UsageError.exit_code)


def _unexpected(out: Output, error: Exception) -> int:
    if os.environ.get("KVFIX_DEBUG"):
        import traceback

        traceback.print_exception(error)
    said = first_line(error)
    shown = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return out.fail("unexpected", f"{shown} (KVFIX_DEBUG=1 shows where)", UNEXPECTED)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and, unless the caller ignores it, SIGINT end the command in order; later ones are ignored."""

    def stop(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if number == signal.SIGTERM or handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
