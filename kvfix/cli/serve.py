"""kvfix serve: a daemon that keeps a model warm and runs the commands of clients that ask for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from kvfix import lean
from kvfix.cli import words
from kvfix.cli.options import LOGGING, PRINTING, DaemonStatus, IdleTimeout, MaxModels, Socket, Stop
from kvfix.cli.output import Output
from kvfix.cli.serving import address
from kvfix.cli.verb import Run, verb
from kvfix.errors import NoDaemonError, UsageError

NEVER = "never"


@verb(LOGGING, PRINTING, example="kvfix serve --idle-timeout 8h & KVFIX_SERVE=1 kvfix edit docs/refunds.md")
def serve(
    run: Run,
    socket: Socket = None,
    idle_timeout: IdleTimeout = NEVER,
    max_models: MaxModels = 1,
    status: DaemonStatus = False,
    stop: Stop = False,
) -> None:
    """Keep a model warm for the commands of this user that ask for it.

    Runs kvfix edit, ask and sync as if they ran by themselves, one after the other, for clients with --serve or
    KVFIX_SERVE=1. Ends on SIGTERM, with --stop, or when idle.
    """
    path = socket or address.socket_path(os.environ)
    idle_s = None if idle_timeout == NEVER else words.seconds(idle_timeout, "--idle-timeout")
    if status or stop:
        _show(run.out, _asked(path, "stop" if stop else "status"), stopping=stop)
        return
    _require_credentials()
    _serve(run.out, path, idle_s, max_models)


def _serve(out: Output, path: Path, idle_s: float | None, max_models: int) -> None:
    from kvfix.cli.app import main
    from kvfix.cli.serving.server import Server
    from kvfix.cli.serving.warm import WarmEngines

    def tell(level: str, event: str, **fields: Any) -> None:
        out.log(level, event, **fields)
        if out.speaks or (level != "info" and not (out.json or out.logs)):
            out.people.print(words.safe(_line(event, fields)), style="dim" if level == "info" else "yellow")

    warm = WarmEngines(max_models)
    server = Server(path, lambda arguments: main(arguments, warm.open), warm, tell)
    with server.listening():
        tell("info", "begin", verb="serve", socket=str(server.path), pid=os.getpid())
        _import_ahead()
        why = server.serve(idle_s)
    served = server.status()
    tell("info", "end", verb="serve", reason=why, num_requests=served["num_requests"])
    out.document({"schema": "kvfix.serve/1", "running": False, "reason": why, **served})


def _import_ahead() -> None:
    """What the first command would wait for; a client that comes meanwhile waits in the queue."""
    import gc

    lean.import_modelling()
    import kvfix.engine
    import kvfix.pipeline.ask
    import kvfix.pipeline.edit
    import kvfix.pipeline.sync
    import kvfix.store  # noqa: F401

    gc.freeze()


def _asked(path: Path, what: str) -> dict[str, Any]:
    """The daemon's word on itself. Raises `NoDaemonError`."""
    from kvfix.cli.serving import client, wire

    try:
        with client.connected(path) as connection:
            wire.send(connection, {"ask": what})
            return (wire.receive(connection) or {})["status"]
    except (OSError, KeyError, wire.MessageError) as error:
        raise NoDaemonError(f"no daemon at {path}; start one with: kvfix serve") from error


def _show(out: Output, found: dict[str, Any], stopping: bool) -> None:
    out.document({"schema": "kvfix.serve/1", "running": True, "stopping": stopping, **found})
    if out.speaks:
        models = ", ".join(found["models"]) or "none yet"
        out.show(
            f"kvfix {found['kvfix']}, process {found['pid']}, at {found['socket']}{', ending' if stopping else ''}",
            f"up {words.duration(found['up_ms'])}, {words.count(found['num_requests'], 'command')} run, "
            f"{found['num_waiting']} waiting, running: {found['running'] or '-'}",
            f"models: {models}; {words.size(found['resident_bytes'])} resident",
        )


def _line(event: str, fields: dict[str, Any]) -> str:
    """What a log has, for people."""
    if event == "request":
        took = words.duration(fields["timing_ms"]["total"])
        return f"{fields['verb']} in {fields['directory']}: exit code {fields['exit_code']}, {took}"
    shown = {"begin": "listening at {socket}", "refused": "refused: {reason}", "failed": "failed: {message}"}
    return shown.get(event, "ended ({reason}), {num_requests} commands run").format(**fields)


def _require_credentials() -> None:
    if not hasattr(socket, "SO_PEERCRED"):
        raise UsageError("kvfix serve needs a system that tells who is at a socket (SO_PEERCRED), as Linux does")
