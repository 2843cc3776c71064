"""A disk that is really full, for passes: exit 9 with the old entries intact, or done; and the next pass goes on.

Needs the right to mount a small tmpfs. KVFIX_LONG=1 tries a hundred amounts of free space instead of three.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfix.store import files
from tests.operations.campaign import Campaign
from tests.operations.site import LONG, Site, ended

DISK_BYTES = 4 << 20
FREE_BYTES = range(0, 600_000, 6_000) if LONG else (0, 30_000, 160_000)


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    path = folder / "small"
    path.mkdir()
    if os.system(f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {path} 2>/dev/null"):
        pytest.skip("no right to mount")
    yield path
    os.system(f"umount -l {path}")


def fill(disk: Path, free_bytes: int) -> Path:
    """Take all space but some."""
    ballast = disk / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - free_bytes)
    return ballast


def no_margin() -> None:
    """Let the disk itself say that it is full: to SQLite too, which comes last."""
    files.need_space = lambda *_: None


def test_passes_on_a_full_disk(site: Site, disk: Path):
    site.store = disk / "store"
    campaign = Campaign(site)
    campaign.change()
    campaign.go_on()
    for free_bytes in FREE_BYTES:
        for name, first in (("told before", lambda: None), ("told by the disk", no_margin)):
            campaign.change()
            ballast = fill(disk, free_bytes)
            campaign.judge(name, ended(campaign.begin(first=first)), {0, 9}, tidy=True)
            ballast.unlink()
            campaign.go_on()
    print(dict(campaign.counts))
    assert campaign.counts["told before, ended"] == len(FREE_BYTES) or LONG
    assert campaign.counts["told by the disk, ended"]
