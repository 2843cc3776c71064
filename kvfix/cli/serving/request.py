"""One command that came to the daemon: run in the client's place, with its streams, folder and environment."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvfix.cli.serving import wire

Command = Callable[[list[str]], int]
STREAMS = ("stdin", "stdout", "stderr")
FIELDS = ("arguments", "directory", "environment", "umask", "encodings")


@dataclass
class Request:
    """A command and its client; `interrupted` is set once the client has had it ended."""

    connection: socket.socket
    streams: list[int]
    arguments: list[str]
    directory: str
    environment: dict[str, str]
    umask: int
    encodings: list[str | None]
    came: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    @classmethod
    def of(cls, connection: socket.socket, body: dict[str, Any], streams: list[int]) -> Request:
        """What a message asks for. Raises `MessageError`."""
        asked: list[Any] = [body.get(name) for name in FIELDS]
        arguments, directory, environment, umask, encodings = asked
        if not (
            len(streams) == len(STREAMS)
            and _all_texts(arguments)
            and isinstance(directory, str)
            and isinstance(environment, dict)
            and _all_texts(list(environment.values()))
            and type(umask) is int
            and isinstance(encodings, list)
            and len(encodings) == len(STREAMS)
            and all(each is None or isinstance(each, str) for each in encodings)
        ):
            raise wire.MessageError("it is no command with its three streams")
        return cls(connection, streams, arguments, directory, environment, umask, encodings)

    def run(self, command: Command) -> int:
        """The exit code of the command. Raises `OSError` where the client's folder cannot be entered."""
        with self._taken_over():
            wire.send(self.connection, {"started": os.getpid()})
            with self._watched():
                return command(self.arguments)

    def answer(self, **body: Any) -> None:
        """Tell the client, if it is still there."""
        with contextlib.suppress(OSError):
            wire.send(self.connection, body)

    def close(self) -> None:
        self.connection.close()
        wire.close(self.streams)

    # ---- in the client's place

    @contextmanager
    def _taken_over(self) -> Iterator[None]:
        """The client's folder, environment and streams are this process's meanwhile."""
        environment, mask = dict(os.environ), os.umask(self.umask & 0o777)
        try:
            os.chdir(self.directory)
            _set_environment(self.environment)
            with self._streams_taken_over():
                yield
        finally:
            _set_environment(environment)
            os.umask(mask)
            os.chdir("/")

    @contextmanager
    def _streams_taken_over(self) -> Iterator[None]:
        """Descriptors 0 to 2 are the client's, for libraries and child processes too."""
        ours = [getattr(sys, name) for name in STREAMS]
        for stream in ours[1:]:
            stream.flush()
        kept = [os.dup(number) for number in range(3)]
        try:
            for number, given in enumerate(self.streams):
                os.dup2(given, number)
            for number, name in enumerate(STREAMS):
                setattr(sys, name, _text_stream(number, self.encodings[number]))
            yield
        finally:
            for name in STREAMS[1:]:
                with contextlib.suppress(OSError, ValueError):
                    getattr(sys, name).flush()
            for number, (name, stream) in enumerate(zip(STREAMS, ours, strict=True)):
                os.dup2(kept[number], number)
                os.close(kept[number])
                setattr(sys, name, stream)

    # ---- the client's signals

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the command as a signal would when the client was sent one, or has gone."""
        ours, theirs = os.pipe()
        watcher = threading.Thread(target=self._watch, args=(ours, threading.get_ident()), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            os.close(theirs)
            watcher.join()
            os.close(ours)

    def _watch(self, done: int, main: int) -> None:
        while done not in select.select([self.connection.fileno(), done], [], [])[0]:
            try:
                body = wire.receive(self.connection)
            except (OSError, wire.MessageError):
                body = None
            asked = signal.SIGTERM if body is None else body.get("signal")
            if asked in (signal.SIGINT, signal.SIGTERM):
                self.interrupted = True
                signal.pthread_kill(main, asked)
            if body is None:
                return


def _all_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and "\0" not in each for each in value)


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _text_stream(number: int, encoding: str | None) -> io.TextIOWrapper:
    """As Python makes it when it starts."""
    raw = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(raw, encoding or "utf-8", errors, line_buffering=number == 2 or raw.isatty())
