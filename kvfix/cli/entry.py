"""Where the command begins: in the standard library alone, the process being the command's own."""

from __future__ import annotations

from kvfix import lean


def main() -> int:
    """Run the command that the process was started with, and return its exit code."""
    lean.want()
    with lean.undisturbed():
        from kvfix.cli import app
    return app.main()
