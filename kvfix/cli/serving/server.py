"""The daemon: takes commands at a socket, one after the other, and runs them in the main thread."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kvfix.cli.serving import address, wire
from kvfix.cli.serving.client import identity
from kvfix.cli.serving.request import Command, Request
from kvfix.errors import DaemonBusyError, UsageError

ANSWER_S = 5.0  # a client that takes longer to say what it wants is none
DRAIN_S = 0.5
BACKLOG = 64
INTERRUPTED = (130, 143)

Tell = Callable[..., None]  # (level, event, **fields)


class Warm(Protocol):
    """What is kept from one command to the next."""

    def names(self) -> list[str]: ...

    def forget(self) -> None: ...


class Stopped(BaseException):
    """A signal, or a client, asks the daemon to end."""


class Server:
    """Listens at `path` while it is entered; `serve` runs what comes."""

    def __init__(self, path: Path, command: Command, warm: Warm, tell: Tell) -> None:
        self.path, self.command, self.warm, self.tell = path.absolute(), command, warm, tell
        self._identity = identity()
        self._waiting: queue.Queue[Request | dict[str, Any]] = queue.Queue()
        self._running: Request | None = None
        self._ended: str | None = None  # why, once it is to end
        self._num_requests = 0
        self._since = time.monotonic()

    # ---- the socket

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Accept clients in a thread. Raises `DaemonBusyError`, and `UsageError` for a path where it cannot listen."""
        with contextlib.ExitStack() as stack:
            try:
                _prepare_folder(self.path.parent)
                stack.enter_context(_held(self.path.with_name(f"{self.path.name}.lock")))
                listener = stack.enter_context(self._bound())
            except OSError as error:
                raise UsageError(f"--socket {self.path}: cannot listen there: {error.strerror or error}") from error
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield

    @contextmanager
    def _bound(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # who holds the lock may clear away what a daemon left that was killed
            self.path.unlink(missing_ok=True)
            mask = os.umask(0o177)
            try:
                listener.bind(os.fspath(self.path))
            finally:
                os.umask(mask)
            listener.listen(BACKLOG)
            try:
                yield listener
            finally:
                self.path.unlink(missing_ok=True)
                listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                self._take(connection)
            except Exception as error:  # one client's trouble is not the next one's
                self._refuse(connection, f"unreadable request: {error}")

    def _take(self, connection: socket.socket) -> None:
        """Read what a client wants; put a command into the queue, answer everything else at once."""
        connection.settimeout(ANSWER_S)
        if address.peer_uid(connection) != os.getuid():
            self._refuse(connection, f"user {address.peer_uid(connection)} is not the daemon's")
            return
        body, streams = wire.receive_with_streams(connection)
        try:
            differing = self._differing(body or {})
            if body is None or "ask" in body or differing or self._ended:
                wire.close(streams)
                self._answer(connection, body, differing)
                return
            request = Request.of(connection, body, streams)
        except BaseException:
            wire.close(streams)
            raise
        connection.settimeout(None)
        self._waiting.put(request)

    def _answer(self, connection: socket.socket, body: dict[str, Any] | None, differing: str | None) -> None:
        if body is None:
            connection.close()
        elif "ask" in body:
            with connection, contextlib.suppress(OSError):
                wire.send(connection, {"status": self.status()})
            if body["ask"] == "stop":
                self._ended = self._ended or "asked to"
                self._waiting.put({})
        else:
            self._refuse(connection, differing or "kvfix serve is ending")

    def _differing(self, body: dict[str, Any]) -> str | None:
        """Why a command of this client would not do here what it does there."""
        if "ask" in body:
            return None
        ours, theirs = self._identity, {name: body.get(name) for name in self._identity}
        for name in ("kvfix", "home"):
            if ours[name] != theirs[name]:
                return (
                    f"kvfix serve is {ours['kvfix']} of {ours['home']}, and this is {theirs['kvfix']} of "
                    f"{theirs['home']}; restart it (kvfix serve --stop, then kvfix serve)"
                )
        fixed = theirs["fixed"] if isinstance(theirs["fixed"], dict) else {}
        changed = [name for name, value in ours["fixed"].items() if fixed.get(name) != value]
        return f"kvfix serve was started with another {changed[0]}" if changed else None

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        with connection, contextlib.suppress(OSError):
            wire.send(connection, {"refused": reason})
            # what it has sent and nobody has read would reach it as a broken connection, before the reason
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(DRAIN_S)
            until = time.monotonic() + DRAIN_S
            while connection.recv(wire.MAX_BYTES) and time.monotonic() < until:
                pass
        self._waiting.put({"level": "warning", "event": "refused", "reason": reason})

    # ---- the commands

    def serve(self, idle_s: float | None) -> str:
        """Run commands until a signal or a client ends it, or none has come for `idle_s`; returns why it ended."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        # a client's terminal is not the daemon's: writing to it must not stop the daemon
        before |= {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTTIN, signal.SIGTTOU)}
        try:
            while self._ended is None:
                self._next(idle_s)
        except Stopped as stopped:
            self._ended = str(stopped)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._send_away()
        return self._ended or ""

    def _stop(self, number: int, frame: object) -> None:
        """Between two commands a signal is the daemon's own, unless a client's came too late."""
        if self._running is None:
            raise Stopped(signal.Signals(number).name)
        if not self._running.interrupted:
            self._ended = signal.Signals(number).name

    def _next(self, idle_s: float | None) -> None:
        try:
            item = self._waiting.get(timeout=idle_s)
        except queue.Empty:
            raise Stopped("idle") from None
        if not isinstance(item, Request):
            if item:
                self.tell(**item)
            return
        self._running = item
        try:
            self._run(item)
        finally:
            item.close()
            self._running = None

    def _run(self, request: Request) -> None:
        begun = time.monotonic()
        try:
            code = request.run(self.command)
        except OSError as error:
            request.answer(refused=f"kvfix serve cannot take its place: {error.strerror or error}")
            self.tell("warning", "refused", reason=str(error))
            return
        except Exception as error:
            code = 1
            self.tell("error", "failed", message=f"{type(error).__name__}: {error}")
        request.answer(exit=code)
        self._num_requests += 1
        if code == 1:
            self.warm.forget()
        if code in INTERRUPTED and not request.interrupted:
            self._ended = signal.Signals(code - 128).name
        ms = {"waited": (begun - request.came) * 1e3, "total": (time.monotonic() - begun) * 1e3}
        verb = request.arguments[0] if request.arguments else None
        self.tell("info", "request", verb=verb, directory=request.directory, exit_code=code, timing_ms=ms, **_memory())

    def _send_away(self) -> None:
        """Let those that still wait run by themselves."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._waiting.get_nowait()
                if isinstance(item, Request):
                    item.answer(refused="kvfix serve is ending")
                    item.close()

    def status(self) -> dict[str, Any]:
        """What the daemon is and does."""
        running = self._running
        return {
            "pid": os.getpid(),
            "kvfix": self._identity["kvfix"],
            "socket": str(self.path),
            "models": self.warm.names(),
            "running": running.arguments[0] if running else None,
            "num_waiting": self._waiting.qsize(),
            "num_requests": self._num_requests,
            "up_ms": (time.monotonic() - self._since) * 1e3,
            **_memory(),
        }


def _memory() -> dict[str, int]:
    import psutil

    return {"resident_bytes": psutil.Process().memory_info().rss}


def _prepare_folder(folder: Path) -> None:
    """Make the socket's folder; `UsageError` for one that others could put another socket into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0) or (found.st_mode & 0o002 and not found.st_mode & 0o1000):
        raise UsageError(f"--socket: others may write to {folder}; name a folder of your own")


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """The lock of a socket, which dies with its daemon. Raises `DaemonBusyError`."""
    with lock.open("a") as file:
        lock.chmod(0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DaemonBusyError(f"kvfix serve is running already at {lock.with_suffix('')}") from None
        yield
