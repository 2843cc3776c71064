"""The client: hands a command over to the daemon with its streams, relays signals, and returns the exit code.

Only the standard library: the client's start is what a command through the daemon waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import kvfix
from kvfix.cli.serving import address, wire

# what libraries read when they are imported is the daemon's for good: a command that has it otherwise runs by itself
FIXED = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
)


class Interrupted(BaseException):
    """A signal came while the command was waiting for its turn."""


def identity() -> dict[str, Any]:
    """What has to be the same at both ends."""
    fixed = {name: os.environ.get(name) for name in FIXED}
    return {"kvfix": kvfix.__version__, "home": str(Path(kvfix.__file__).parent), "fixed": fixed}


def hand_over(path: Path, arguments: Sequence[str]) -> int | None:
    """The exit code of a command that the daemon has run; None, and why, where the command has to run here."""
    if "-" in arguments and sys.stdin and sys.stdin.isatty():
        # only a process of the terminal's own session may read from it
        return None
    try:
        with connected(path) as connection:
            return _Handover(connection, arguments).run()
    except (OSError, wire.MessageError):
        _say(arguments, f"no daemon at {path} (kvfix serve starts one): running here")
        return None


@contextlib.contextmanager
def connected(path: Path) -> Any:
    """A connection to the daemon of this user. Raises `OSError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.fspath(path))
        if address.peer_uid(connection) != os.getuid():
            raise PermissionError("the socket is somebody else's")
        yield connection


class _Handover:
    """One command at the daemon."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str]) -> None:
        self.connection, self.arguments = connection, arguments
        self.started = False

    def run(self) -> int | None:
        before = self._relay_signals()
        try:
            self._send()
            return self._wait()
        except Interrupted as interrupted:
            number = interrupted.args[0]
            return _fail(self.arguments, "interrupted", f"interrupted by {signal.Signals(number).name}", 128 + number)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _relay_signals(self) -> dict[int, Any]:
        """Pass on what would end the command; what was done with it before."""

        def relay(number: int, frame: object) -> None:
            if not self.started:
                raise Interrupted(number)
            with contextlib.suppress(OSError):
                wire.send(self.connection, {"signal": number})

        before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number, handler in before.items():
            if number == signal.SIGTERM or handler is not signal.SIG_IGN:
                signal.signal(number, relay)
        return before

    def _send(self) -> None:
        mask = os.umask(0)
        os.umask(mask)
        body = {
            **identity(),
            "arguments": list(self.arguments),
            "directory": os.getcwd(),
            "environment": dict(os.environ),
            "umask": mask,
            "encodings": [getattr(stream, "encoding", None) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        }
        streams = _open_streams()
        wire.send(self.connection, body, streams)

    def _wait(self) -> int | None:
        while (body := wire.receive(self.connection)) is not None:
            if "refused" in body:
                _say(self.arguments, f"{body['refused']}: running here")
                return None
            if "exit" in body:
                return int(body["exit"])
            self.started = True
        if not self.started:
            raise ConnectionResetError
        message = "kvfix serve ended before the command did (its log may say why); run the command again"
        return _fail(self.arguments, "unexpected", message, 1)


def _open_streams() -> list[int]:
    """The three standard streams; nothing stands for one that is closed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    streams = []
    for stream in range(3):
        try:
            os.fstat(stream)
            streams.append(stream)
        except OSError:
            streams.append(nothing)
    return streams


def _logs(arguments: Sequence[str]) -> bool:
    return "--log-format=json" in arguments or ("--log-format", "json") in pairwise(arguments)


def _say(arguments: Sequence[str], line: str) -> None:
    """One line, as the command itself would say it in passing."""
    if "--quiet" in arguments or sys.stderr is None:
        return
    if _logs(arguments):
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        line = json.dumps({"time": now, "level": "info", "event": "note", "message": line})
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _fail(arguments: Sequence[str], code: str, message: str, exit_code: int) -> int:
    """The one message of a failure, as the command itself would put it."""
    with contextlib.suppress(OSError):
        if "--json" in arguments:
            error = {"code": code, "message": message, "exit_code": exit_code}
            print(json.dumps({"schema": "kvfix.error/1", "error": error}), flush=True)
        elif not _logs(arguments):
            print(f"error: {message}", file=sys.stderr, flush=True)
    return exit_code
