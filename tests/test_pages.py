"""Pages of mapped tensors: found where they are mapped, let go of, and read again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfix import pages
from kvfix.pages import MappedFiles

LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell")


@pytest.fixture
def mapped(tmp_path):
    save_file({"rows": torch.arange(1 << 20, dtype=torch.float32)}, tmp_path / "a.safetensors")
    return load_file(tmp_path / "a.safetensors")["rows"]


@LINUX
def test_files_are_told_from_other_memory(mapped):
    files = MappedFiles()
    assert files.hold(mapped)
    assert files.hold(mapped[1000:2000])
    assert not files.hold(torch.zeros(1 << 20))


def test_a_system_that_does_not_tell(mapped, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError

    monkeypatch.setattr("builtins.open", refused)
    assert not MappedFiles().hold(mapped)


def test_what_was_let_go_of_is_read_again(mapped):
    pages.forget(mapped)
    assert torch.equal(mapped, torch.arange(1 << 20, dtype=torch.float32))


@LINUX
def test_it_is_out_of_memory_meanwhile(mapped):
    def resident():
        text = open("/proc/self/smaps").read()  # noqa: SIM115
        entry = text[text.index("a.safetensors") :]
        return int(entry[entry.index("Rss:") + 4 :].split()[0])

    mapped.sum()
    before = resident()
    pages.forget(mapped)
    assert before > 4000
    assert resident() < 100
