"""The writer lock: a kernel lock that dies with its holder, and a note that says who holds it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from kvfix.errors import KVFixError, StoreBusyError
from kvfix.store import files
from kvfix.store.layout import Layout
from kvfix.store.records import now


class WriterLock:
    """At most one process writes to a store. Within a process the lock may be taken again, from any thread."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock: FileLock | None = None
        # taking it and its note, or giving both back, is one step for the other threads
        self._step = threading.Lock()

    @contextmanager
    def held(self, verb: str, timeout_s: float) -> Iterator[None]:
        """Hold the lock; StoreBusyError, naming the holder, if it is not free within `timeout_s`."""
        with self._step, files.while_writing(self._layout.lock):
            lock = self._file_lock()
            try:
                lock.acquire(timeout=timeout_s)
            except Timeout as error:
                raise StoreBusyError(f"Another process is writing to the store: {self.holder()}.") from error
            if lock.lock_counter == 1:
                self._note(verb)
        try:
            yield
        finally:
            with self._step:
                if lock.lock_counter == 1:
                    with contextlib.suppress(OSError):
                        self._layout.holder.unlink()
                lock.release()

    def holder(self) -> str:
        """Who holds the lock, for people."""
        try:
            note = json.loads(files.read_bytes(self._layout, self._layout.holder))
            return f"kvfix {note['verb']}, process {note['pid']} on {note['host']}, since {note['since']}"
        except (OSError, KVFixError, ValueError, KeyError, TypeError):
            return "it has left no name"

    def _file_lock(self) -> FileLock:
        if self._lock is None:
            self._layout.refuse_symlinks(self._layout.lock)
            with contextlib.suppress(FileExistsError):
                files.create(self._layout.lock)
            self._lock = FileLock(str(self._layout.lock), thread_local=False)
        return self._lock

    def _note(self, verb: str) -> None:
        """Write the holder's note; it is a courtesy, so a full disk does not stop the holder."""
        note = {"pid": os.getpid(), "host": socket.gethostname(), "verb": verb, "since": now()[:19] + "Z"}
        with contextlib.suppress(OSError):
            # it may be another user's, left when that one was killed
            self._layout.holder.unlink(missing_ok=True)
            self._layout.holder.write_text(json.dumps(note), encoding="utf-8")
