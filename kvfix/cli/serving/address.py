"""Where the daemon listens, which commands go there, and who may."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

VERBS = ("edit", "ask", "sync")
VARIABLE = "KVFIX_SERVE"
OPTION = "--serve"
OFF, DEFAULT = ("", "0"), ("", "0", "1")


def wanted(arguments: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """The socket of the daemon that a command is to go to; None where it is to run by itself."""
    given = environ.get(VARIABLE, "")
    if not arguments or arguments[0] not in VERBS or (given in OFF and OPTION not in arguments):
        return None
    return socket_path(environ)


def socket_path(environ: Mapping[str, str]) -> Path:
    """What KVFIX_SERVE names, else `kvfix/serve.sock` in the user's folder of running things."""
    given = environ.get(VARIABLE, "")
    if given not in DEFAULT:
        return Path(given).expanduser()
    folder = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    return (folder / "kvfix" if folder.is_dir() else Path(f"/tmp/kvfix-{os.getuid()}")) / "serve.sock"


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, by the kernel's word."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)
