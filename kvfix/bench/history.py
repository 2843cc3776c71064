"""Past edits of documents in a git repository: git reads them, and nothing that the repository says is run."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kvfix.config import DEFAULT_INCLUDE
from kvfix.errors import UsageError

MAX_COMMITS = 20_000  # the newest that touch a document
MAX_BYTES = 2**20  # of one document
PER_COMMIT = 4  # documents of one commit, so that no sweeping change makes up the sample

# the user's own settings, such as whose directories are safe, stay; what points git elsewhere does not
KEPT = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_EXEC_PATH", "GIT_CEILING_DIRECTORIES")
# a repository may overrule protocol.allow for one protocol, but not GIT_ALLOW_PROTOCOL
SAFE = {
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
OPTIONS = ("--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never")
DIFF = ("-r", "-z", "--raw", "--no-abbrev", "--no-commit-id", "-M", "-l1000", "--no-ext-diff", "--no-textconv")

KINDS = {b"120000": "symlink", b"160000": "submodule"}
STATUSES = {b"A": "added", b"D": "deleted", b"T": "changed its kind"}


@dataclass(frozen=True)
class PastEdit:
    """One document before and after one commit."""

    commit: str  # in full
    path: str  # below the repository's root, bytes that are not UTF-8 as escapes
    before: str
    after: str
    renamed: bool = False


class Change(NamedTuple):
    """One line of a raw diff."""

    status: bytes  # M, A, D, T, or R with the similarity
    modes: tuple[bytes, bytes]
    blobs: tuple[bytes, bytes]  # ids
    path: bytes

    @property
    def obstacle(self) -> str | None:
        """Why this is no edit of a document."""
        kind = next((KINDS[mode] for mode in self.modes if mode in KINDS), None)
        if kind or self.status[:1] in STATUSES:
            return kind or STATUSES[self.status[:1]]
        return "renamed only" if self.blobs[0] == self.blobs[1] else None


class PassedOverError(Exception):
    """A document that cannot be taken; the message is the reason to count."""


class Repository:
    """A git repository, or a directory in one, that is only read.

    Raises `UsageError` where there is no git, no repository or no commit.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        git = shutil.which("git")
        if git is None:
            raise UsageError("git is not on PATH; it is needed to read a repository's history")
        if not os.path.isdir(self.folder):
            raise UsageError(f"{self.folder}: no such directory")
        self._git = git
        try:
            self.run("rev-parse", "--git-dir")
        except UsageError as error:
            raise UsageError(f"{self.folder}: not a git repository that can be read ({error})") from error
        try:
            self.run("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except UsageError as error:
            raise UsageError(f"{self.folder}: the repository has no commit yet") from error
        self.is_shallow = self.run("rev-parse", "--is-shallow-repository").strip() == b"true"

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """What to run, and in which environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in KEPT}
        return [self._git, *OPTIONS, "-C", self.folder, *arguments], {**kept, **SAFE}

    def run(self, *arguments: str) -> bytes:
        """A command's output. Raises `UsageError` with git's own words."""
        command, environment = self.command(*arguments)
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            said = done.stderr.decode("utf-8", "backslashreplace").strip().splitlines() or [f"exit {done.returncode}"]
            raise UsageError(said[0])
        return done.stdout

    def commits(self, paths: Sequence[str]) -> list[str]:
        """Commits that touch these paths, newest first, merges left out: what they merge counts by itself."""
        return self.run("rev-list", "--no-merges", f"--max-count={MAX_COMMITS}", "HEAD", *paths).decode().split()

    def num_merges(self) -> int:
        return int(self.run("rev-list", "--merges", "--count", "HEAD"))

    def changes(self, commit: str, paths: Sequence[str]) -> list[Change]:
        """What a commit did to these paths, renames recognised. Raises `UsageError` where git cannot tell."""
        fields = iter(self.run("diff-tree", *DIFF, commit, *paths).split(b"\0"))
        changes = []
        for head in fields:
            if not head:
                break
            mode_old, mode_new, blob_old, blob_new, status = head.removeprefix(b":").split(b" ")
            path = next(fields)
            if status[:1] in (b"R", b"C"):
                path = next(fields)
            changes.append(Change(status, (mode_old, mode_new), (blob_old, blob_new), path))
        return changes


@dataclass
class History:
    """The past edits of a repository's documents in a seeded order, any first part of it spread over all the time.

    `skipped` counts, by reason, what was passed over in the commits read so far.
    """

    repository: Repository
    include: Sequence[str] = DEFAULT_INCLUDE  # patterns of names
    seed: int = 0
    max_bytes: int = MAX_BYTES
    skipped: Counter[str] = field(default_factory=Counter)
    num_commits: int = 0  # that touch a document
    num_read: int = 0

    def edits(self) -> Generator[PastEdit]:
        """One document of one commit at a time, read when it is asked for."""
        paths = ["--", *(_pathspec(pattern) for pattern in self.include)]
        commits = self.repository.commits(paths)
        self.num_commits = len(commits)
        rng = random.Random(self.seed)
        rng.shuffle(commits)
        with Blobs(self.repository, self.max_bytes) as blobs:
            for commit in commits:
                self.num_read += 1
                yield from self._edits(commit, paths, blobs, rng)

    def _edits(self, commit: str, paths: list[str], blobs: Blobs, rng: random.Random) -> Iterator[PastEdit]:
        try:
            changes = self.repository.changes(commit, paths)
        except UsageError:
            self.skipped["commit that git cannot read"] += 1
            return
        self.skipped.update(change.obstacle for change in changes if change.obstacle)
        changes = [change for change in changes if not change.obstacle]
        if len(changes) > PER_COMMIT:
            self.skipped[f"beyond {PER_COMMIT} documents of one commit"] += len(changes) - PER_COMMIT
            changes = rng.sample(changes, PER_COMMIT)
        for change in changes:
            try:
                before, after = (blobs.text(blob) for blob in change.blobs)
            except PassedOverError as reason:
                self.skipped[str(reason)] += 1
                continue
            path = change.path.decode("utf-8", "backslashreplace")
            yield PastEdit(commit, path, before, after, change.status.startswith(b"R"))


class Blobs:
    """Texts by the ids of their blobs, each one's size looked at before it is read."""

    def __init__(self, repository: Repository, max_bytes: int) -> None:
        self._sizes = CatFile(repository, "--batch-check")
        self._contents = CatFile(repository, "--batch")
        self.max_bytes = max_bytes

    def __enter__(self) -> Blobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sizes.close()
        self._contents.close()

    def text(self, blob: bytes) -> str:
        """The text of a blob, a byte order mark left out. Raises `PassedOverError`."""
        size = self._sizes.size(blob)
        if size is not None and size > self.max_bytes:
            raise PassedOverError(f"larger than {self.max_bytes} bytes")
        if size is None or self._contents.size(blob) != size:
            raise PassedOverError("not in this clone")
        content = self._contents.read(size)
        if b"\0" in content:
            raise PassedOverError("binary")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise PassedOverError("not UTF-8") from error


class CatFile:
    """One `git cat-file` process, started when it is first asked and anew where git has given up on an object."""

    def __init__(self, repository: Repository, mode: str) -> None:
        self._command, self._environment = repository.command("cat-file", mode)
        self._process: subprocess.Popen[bytes] | None = None

    def size(self, blob: bytes) -> int | None:
        """Bytes of a blob, None where it cannot be had; with `--batch` the content is to be read next."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(blob + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return None
        said = self._process.stdout.readline().split()
        if not said:
            self.close()
        return int(said[2]) if len(said) == 3 and said[1] == b"blob" else None

    def read(self, size: int) -> bytes:
        """The content whose size was just told."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.read(size + 1)[:size]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _pathspec(pattern: str) -> str:
    """A pattern of names or of whole paths, as `corpus.scan` takes them, in git's words."""
    return f":(icase){pattern}" if "/" in pattern else f":(glob,icase)**/{pattern}"


def open_history(folder: str | Path, include: Sequence[str] = DEFAULT_INCLUDE, seed: int = 0) -> History:
    """The history of the repository at `folder`. Raises `UsageError`."""
    return History(Repository(folder), include, seed)
