"""A store on a network file system: doctor says what holds there, verbs that write warn."""

from collections import namedtuple

import psutil
import pytest

from kvfix.store import place as place_module
from kvfix.store.place import Locks

Mount = namedtuple("Mount", "device mountpoint fstype opts")


@pytest.fixture
def on_nfs(monkeypatch):
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [Mount("server:/x", "/", "nfs4", "rw,nolock")])


def test_verbs_that_write_warn_once(place, at, on_nfs):
    for words in (["gc"], ["sync", place.corpus], ["compact"]):
        said = at(*words).err
        assert said.count("warning: the store lies on a network file system (nfs4)") == 1
        assert "warning: it is mounted with nolock" in said
        assert "do not lock" not in said
    assert at("gc", "--quiet").err == ""
    for words in (["status"], ["gc", "--dry-run"], ["sync", place.corpus, "--dry-run"]):
        assert "network" not in at(*words).err
    assert list((place.store / "tmp").iterdir()) == []


def test_locks_that_do_not_lock_are_told_even_to_the_quiet(place, at, on_nfs, monkeypatch):
    monkeypatch.setattr(place_module, "try_locks", lambda folder: Locks(flock=False, posix=True))
    assert at("gc", "--quiet").err.startswith("warning: flock locks do not lock on the store's file system")


def test_nothing_is_tried_on_a_local_disk(place, at, monkeypatch):
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [Mount("/dev/a", "/", "ext4", "rw")])
    monkeypatch.setattr(place_module, "try_locks", lambda folder: pytest.fail("tried"))
    assert "warning" not in at("gc").err


def test_doctor_says_what_holds(place, at, on_nfs, monkeypatch):
    found = at("doctor", "--json").json["store"]
    assert (found["file_system"], found["network"]) == ("nfs4", True)
    assert found["locks"] == {"flock": True, "posix": True}
    assert "network file system" in found["notes"][0]
    shown = at("doctor").err
    assert "nfs4, over a network" in shown
    assert "another process was kept out" in shown
    monkeypatch.setattr(place_module, "try_locks", lambda folder: Locks(flock=True, posix=False))
    shown = at("doctor").err
    assert "another process was NOT kept out" in shown
    assert "POSIX locks do not lock" in shown


def test_doctor_tries_nothing_where_there_is_no_store(kvfix, tmp_path, model):
    found = kvfix("doctor", "--store", "none", "--model", model, "--json").json["store"]
    assert (found["exists"], found["locks"]) == (False, None)
    assert found["file_system"]
