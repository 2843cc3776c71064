"""A small corpus, a store of it that is built once, and a way to call the command line in this process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvfix.cli.app import main

FERRY = "The ferry leaves at noon and the fare is 30 crowns for a grown person. " + "Children pay half of it. " * 8
RULES = "# Rules\n\nNobody may stand on the bow. " + "The captain decides in every other case. " * 6
TEXTS = {"ferry.md": FERRY, "rules/deck.md": RULES, "empty.md": ""}


@dataclass(frozen=True)
class Result:
    """What one command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out, parse_constant=pytest.fail)


@dataclass(frozen=True)
class Place:
    """A corpus and its store, both of which a test may spoil."""

    corpus: Path
    store: Path

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.corpus / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def replace(self, name: str, old: str, new: str) -> Path:
        text = (self.corpus / name).read_text()
        assert old in text
        return self.write(name, text.replace(old, new))

    @property
    def ferry(self) -> Path:
        return self.corpus / "ferry.md"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the caller's reaches a test."""
    for name in os.environ:
        if name.startswith("KVFIX_") and name != "KVFIX_CACHE":
            monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def model(zoo: Callable[..., Path]) -> str:
    return str(zoo("llama", max_position_embeddings=2048))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, model: str) -> Place:
    """The corpus and its store as they are before a test; not to be touched."""
    root = tmp_path_factory.mktemp("built")
    place = Place(root / "docs", root / "original")
    for name, text in TEXTS.items():
        place.write(name, text)
    assert main(["build", str(place.corpus), "--store", str(place.store), "--model", model, "--quiet"]) == 0
    return place


@pytest.fixture
def place(built: Place) -> Iterator[Place]:
    """The corpus where the store knows it, and a copy of the store."""
    copied = Place(built.corpus, built.store.with_name("store"))
    shutil.copytree(built.store, copied.store)
    yield copied
    shutil.rmtree(copied.store)
    shutil.rmtree(copied.corpus)
    for name, text in TEXTS.items():
        copied.write(name, text)


@pytest.fixture
def kvfix(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Call the command line from an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return call


@pytest.fixture
def at(kvfix: Callable[..., Result], place: Place, model: str) -> Callable[..., Result]:
    """The same with the store and the model of `place`."""

    def call(*arguments: object) -> Result:
        modelled = arguments[0] not in ("status", "gc", "compact", "fsck")
        return kvfix(*arguments, "--store", place.store, *(("--model", model) if modelled else ()))

    return call
