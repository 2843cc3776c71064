"""Where the command begins, in the standard library alone: at the daemon, if it is asked for, or here."""

from __future__ import annotations

import os
import sys

from kvfix import lean
from kvfix.cli.serving import address


def main() -> int:
    """Run the command that the process was started with, and return its exit code."""
    arguments = sys.argv[1:]
    path = address.wanted(arguments, os.environ)
    if path is not None:
        from kvfix.cli.serving import client

        code = client.hand_over(path, arguments)
        if code is not None:
            return code
    # the process is the command's own
    lean.want()
    with lean.undisturbed():
        from kvfix.cli import app
    return app.main()
