"""Messages between client and daemon: JSON behind its length, a command's with the three standard streams."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

LENGTH = struct.Struct("!I")
MAX_BYTES = 4 << 20


class MessageError(Exception):
    """What came is no message."""


def send(connection: socket.socket, body: dict[str, Any], streams: Sequence[int] = ()) -> None:
    """Send a message, with file descriptors."""
    data = json.dumps(body).encode()
    if streams:
        socket.send_fds(connection, [LENGTH.pack(len(data))], list(streams))
        connection.sendall(data)
    else:
        connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None where the other end has gone. Raises `MessageError`."""
    head = _exactly(connection, LENGTH.size)
    return None if head is None else _body(connection, head)


def receive_with_streams(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The first message and the file descriptors that came with it, which are closed where it is none."""
    head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    try:
        for stream in streams:
            os.set_inheritable(stream, False)
        if head and len(head) < LENGTH.size:
            head += _exactly(connection, LENGTH.size - len(head)) or b""
        return (_body(connection, head) if head else None), streams
    except BaseException:
        close(streams)
        raise


def close(streams: Sequence[int]) -> None:
    for stream in streams:
        with contextlib.suppress(OSError):
            os.close(stream)


def _body(connection: socket.socket, head: bytes) -> dict[str, Any]:
    if len(head) != LENGTH.size or LENGTH.unpack(head)[0] > MAX_BYTES:
        raise MessageError("its length makes no sense")
    data = _exactly(connection, LENGTH.unpack(head)[0])
    try:
        body = json.loads(data or b"")
    except (ValueError, RecursionError) as error:
        raise MessageError("it is not JSON") from error
    if not isinstance(body, dict):
        raise MessageError("it is no JSON object")
    return body


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    """So many bytes; None where none come any more."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    if data and len(data) < size:
        raise MessageError("it ends too early")
    return data or None
