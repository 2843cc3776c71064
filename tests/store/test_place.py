"""Where a store lies: told by the system's mounts, which are made up here, and tried where that can be."""

import fcntl
from collections import namedtuple

import psutil
import pytest

from kvfix.store import place as place_module
from kvfix.store.place import Locks, Place, place_of, try_locks

Mount = namedtuple("Mount", "device mountpoint fstype opts")


@pytest.fixture
def mounted(monkeypatch, tmp_path):
    """`mounted(point, kind, options)` stands beside a root on ext4; points are below the test's folder."""

    def mount(*given):
        table = [Mount("/dev/a", "/", "ext4", "rw")]
        table += [Mount("x", str(tmp_path / point), kind, options) for point, kind, options in given]
        monkeypatch.setattr(psutil, "disk_partitions", lambda all: table)

    return mount


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("nfs", "nfs"),
        ("nfs4", "nfs"),
        ("cifs", "cifs"),
        ("smb3", "smb"),
        ("lustre", "lustre"),
        ("fuse.sshfs", "fuse"),
        ("fuseblk", None),
        ("9p", "9p"),
        ("ext4", None),
        ("tmpfs", None),
        ("overlay", None),
        ("", None),
    ],
)
def test_network_file_systems_are_known_by_name(mounted, tmp_path, kind, family):
    (tmp_path / "data" / "store").mkdir(parents=True)
    mounted(("data", kind, "rw,vers=4.2"))
    found = place_of(tmp_path / "data" / "store")
    assert (found.kind, found.family) == (kind, family)
    assert [kind in note and "only one writer" in note for note in found.notes()] == [True] * bool(family)


def test_the_nearest_mount_above_decides_and_of_two_the_upper_one(mounted, tmp_path):
    for name in ("data/deep", "database"):
        (tmp_path / name).mkdir(parents=True)
    mounted(("data", "ext4", "rw"), ("data", "nfs4", "rw"), ("data/deep", "xfs", "rw"))
    assert place_of(tmp_path / "data").kind == "nfs4"
    assert place_of(tmp_path / "data" / "deep").kind == "xfs"
    assert place_of(tmp_path / "database").kind == "ext4"
    (tmp_path / "link").symlink_to(tmp_path / "data" / "deep")
    assert place_of(tmp_path / "link").kind == "xfs"


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("nfs", "rw,nolock", "nolock"),
        ("nfs4", "rw,local_lock=all", "local_lock=all"),
        ("cifs", "rw,nobrl", "nobrl"),
        ("lustre", "rw,localflock", "localflock"),
        ("nfs4", "rw,local_lock=none", None),
        ("lustre", "rw,flock", None),
    ],
)
def test_mounts_whose_locks_are_one_machines_are_named(kind, options, said):
    notes = Place(kind, tuple(options.split(","))).notes()
    assert [note for note in notes if "this machine alone" in note] == notes[1:]
    assert len(notes) == 1 + bool(said)
    assert said is None or f"mounted with {said}:" in notes[1]


def test_a_table_that_cannot_be_read_tells_nothing(monkeypatch, tmp_path):
    def fail(all):
        raise PermissionError

    monkeypatch.setattr(psutil, "disk_partitions", fail)
    assert place_of(tmp_path) == Place()
    assert Place().notes() == []


def test_this_machines_table_is_understood(tmp_path):
    assert place_of(tmp_path).kind


class TestTrial:
    def test_locks_lock_here_and_nothing_is_left(self, tmp_path):
        assert try_locks(tmp_path) == Locks(flock=True, posix=True)
        assert Locks(flock=True, posix=True).notes() == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("broken", "named"), [("flock", "flock locks"), ("lockf", "POSIX locks")])
    def test_locks_that_do_not_lock_are_found_out(self, tmp_path, monkeypatch, broken, named):
        """We believe that we hold it, as on a mount that ignores locks."""
        monkeypatch.setattr(fcntl, broken, lambda *args: None)
        found = try_locks(tmp_path)
        assert found == Locks(flock=broken != "flock", posix=broken != "lockf")
        assert found.notes()[0].startswith(f"{named} do not lock")

    @pytest.mark.parametrize("rival", ["import sys; sys.exit(9)", "1 / 0", "not Python", "import os; os.abort()"])
    def test_a_trial_that_fails_proves_nothing(self, tmp_path, monkeypatch, rival):
        monkeypatch.setattr(place_module, "RIVAL", rival)
        assert try_locks(tmp_path) is None

    def test_it_cannot_be_made_where_nothing_can_be_written(self, tmp_path):
        assert try_locks(tmp_path / "nowhere") is None
