"""Daemons for tests: processes of their own, and clients of theirs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KVFIX = [sys.executable, "-m", "kvfix"]
PATIENCE_S = 120


def until(happens: Callable[[], Any], what: str) -> Any:
    """Wait for something, for as long as a busy machine may take."""
    end = time.monotonic() + PATIENCE_S
    while not (found := happens()):
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.02)
    return found


def run(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; its environment is Python's, to which readline has added nothing."""
    more.setdefault("env", dict(os.environ))
    return subprocess.run([*KVFIX, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S, **more)


@dataclass
class Daemon:
    """A running `kvfix serve` and its log."""

    process: subprocess.Popen
    socket: Path
    log: Path

    @classmethod
    def start(cls, folder: Path, *options: str) -> Daemon:
        folder.mkdir(exist_ok=True)
        socket, log = folder / "serve.sock", folder / "log.jsonl"
        with log.open("a") as err:
            words = [*KVFIX, "serve", "--socket", str(socket), "--log-format", "json", *options]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
        daemon = cls(process, socket, log)
        until(lambda: daemon.events("begin") or process.poll() is not None, "a daemon")
        return daemon

    @property
    def environment(self) -> dict[str, str]:
        """A client's."""
        return {**os.environ, "KVFIX_SERVE": str(self.socket)}

    def run(self, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """A command through the daemon; fails the test where it has not gone there."""
        before = len(self.events("request"))
        done = run(*arguments, env=self.environment, **more)
        until(lambda: len(self.events("request")) > before, "the request in the log")
        return done

    def begin(self, *arguments: object) -> subprocess.Popen[str]:
        words = [*KVFIX, *map(str, arguments)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=PATIENCE_S)


def untimed(text: str) -> str:
    """Output without what the clock says."""
    text = re.sub(r'"([a-z_]*_ms|speedup)": (\{[^{}]*\}|[\d.e+-]+|null)', r'"\1": 0', text)
    text = re.sub(r"\d[\d.,]* ?(ms|s|min|x)\b", "TIME", text)
    # tables are as wide as what is in them
    return re.sub(r"[ \u2500-\u257f]+", " ", text)
