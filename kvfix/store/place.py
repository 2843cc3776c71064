"""What a store's file system is, and whether locks lock there: names tell what to expect, a trial what is so."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

# a second process's exit status: 10, and 1 more where it gets a flock, 2 more where it gets a POSIX lock
RIVAL = """
import fcntl, sys
got = 0
for bit, take in ((1, fcntl.flock), (2, fcntl.lockf)):
    with open(sys.argv[1], "r+b") as file:
        try:
            take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            got |= bit
        except OSError:
            pass
sys.exit(10 + got)
"""

NETWORK = ("nfs", "cifs", "smb", "lustre", "fuse", "9p", "ceph", "gluster", "beegfs", "gpfs", "afs", "virtiofs")
# mounted so, locks are this machine's alone, or none
LOCAL_LOCKS = {
    "nfs": ("nolock", "local_lock=all", "local_lock=flock", "local_lock=posix"),
    "cifs": ("nobrl", "nolease"),
    "lustre": ("localflock", "noflock"),
}
HOLDS = "readers see the old version or the new one, whole, and a killed writer leaves only files that gc removes"
DEPENDS = {
    "nfs": "the server's lock manager has to run, and every client has to mount without nolock and local_lock",
    "cifs": "the server has to pass byte-range locks on (no nobrl)",
    "lustre": "every client has to mount with flock",
    "fuse": "it is up to the program behind the mount, and many lock on one machine only",
}


@dataclass(frozen=True)
class Locks:
    """Whether a lock that one process holds is refused to another one on this machine."""

    flock: bool  # the writer lock
    posix: bool  # SQLite's own

    def notes(self) -> list[str]:
        """What does not hold, for people."""
        names = [name for name, held in (("flock", self.flock), ("POSIX", self.posix)) if not held]
        if not names:
            return []
        return [
            f"{' and '.join(names)} locks do not lock on the store's file system: two writers at once can damage the "
            "manifest, so let one process write at a time"
        ]


@dataclass(frozen=True)
class Place:
    """The file system that a path lies on."""

    kind: str | None = None  # as the system names it; None where it is not told
    options: tuple[str, ...] = field(default=())

    @property
    def family(self) -> str | None:
        """The network file system it is one of; None for a local one."""
        kind = (self.kind or "").lower()
        # a disk that a FUSE program mounts from a block device is a local one
        return None if kind == "fuseblk" else next((name for name in NETWORK if kind.startswith(name)), None)

    def notes(self) -> list[str]:
        """What holds on a network file system and what does not, for people; nothing of a local one."""
        if self.family is None:
            return []
        depends = DEPENDS.get(self.family, "see its manual")
        said = [
            f"the store lies on a network file system ({self.kind}): {HOLDS}; but that only one writer works at a time "
            f"rests on file locks between machines, and the compare-and-swap in SQLite on the same: {depends}"
        ]
        alone = [option for option in LOCAL_LOCKS.get(self.family, ()) if option in self.options]
        if alone:
            said.append(f"it is mounted with {', '.join(alone)}: locks keep out writers on this machine alone")
        return said


def place_of(path: str | os.PathLike[str]) -> Place:
    """The file system of a path that is there, by the system's table of mounts."""
    import psutil

    real = os.path.realpath(path)
    try:
        mounts = psutil.disk_partitions(all=True)
    except (OSError, psutil.Error):
        return Place()
    # of those at the same point the last one lies on top
    above = [m for m in mounts if real == m.mountpoint or real.startswith(m.mountpoint.rstrip("/") + "/")]
    nearest = max(above, key=lambda m: len(m.mountpoint), default=None)
    if nearest is None:
        return Place()
    top = [m for m in above if m.mountpoint == nearest.mountpoint][-1]
    return Place(top.fstype, tuple(top.opts.split(",")))


def try_locks(folder: str | os.PathLike[str]) -> Locks | None:
    """Lock a new file in a folder, both ways, and have another process try; None where it cannot be tried."""
    try:
        import fcntl

        with tempfile.NamedTemporaryFile(prefix="locks-", dir=folder) as file:
            results = []
            for take in (fcntl.flock, fcntl.lockf):
                with open(file.name, "r+b") as mine:
                    take(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    results.append(_rival_gets(Path(file.name)))
    except (ImportError, OSError, subprocess.SubprocessError):
        return None
    return Locks(flock=not results[0] & 1, posix=not results[1] & 2)


def _rival_gets(path: Path) -> int:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", RIVAL, path], check=False, timeout=20, capture_output=True)
    if done.returncode not in range(10, 14):
        raise OSError("the trial itself failed")
    return done.returncode - 10
