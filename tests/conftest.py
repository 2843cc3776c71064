"""What all tests share: tiny models made once, a cache folder of their own, and the demo model where it is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.zoo import save_model

if TYPE_CHECKING:
    from kvfix.engine import Engine

# passes over tiny models are short: threads that wait for one another cost more than they bring
os.environ.setdefault("OMP_NUM_THREADS", "1")

# read when Triton is first imported: without a GPU its kernels are interpreted
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")

settings.register_profile("kvfix", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("kvfix")

USER_CACHE = os.environ.get("KVFIX_CACHE")


@contextmanager
def cache_folder_of(folder: str | None) -> Iterator[None]:
    """`KVFIX_CACHE` as given, None leaves it unset."""
    before = os.environ.pop("KVFIX_CACHE", None)
    if folder is not None:
        os.environ["KVFIX_CACHE"] = folder
    try:
        yield
    finally:
        os.environ.pop("KVFIX_CACHE", None)
        if before is not None:
            os.environ["KVFIX_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test leaves anything in the user's cache folder."""
    with cache_folder_of(str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(scope="session")
def user_cache(own_cache: None) -> Callable[[], Any]:
    """A context in which the user's own cache folder, where the demo model lies, is used."""
    return lambda: cache_folder_of(USER_CACHE)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`zoo(name)` is the folder of a tiny random model, made when it is first asked for.

    Settings make another model of the same kind, e.g. `zoo("llama", max_position_embeddings=2048)`.
    """
    root = tmp_path_factory.mktemp("zoo")

    def folder(name: str, **settings: Any) -> Path:
        parts = [name, *(f"{key}={value}" for key, value in sorted(settings.items()))]
        return save_model(root / ",".join(parts), name, **settings)

    return folder


@pytest.fixture(scope="session")
def gated(zoo: Callable[..., Path]) -> Callable[..., Engine]:
    """`gated(name)` is a zoo model's engine, past its gate and shared by all tests: leave it as it is."""
    from kvfix.engine import Engine, run_gate

    engines: dict[tuple, Engine] = {}

    def engine(name: str, dtype: str = "float32", **settings: Any) -> Engine:
        key = (name, dtype, *sorted(settings.items()))
        if key not in engines:
            engines[key] = Engine.open(str(zoo(name, **settings)), device="cpu", dtype=dtype)
            engines[key].gate_report = run_gate(engines[key])
        return engines[key]

    return engine


@pytest.fixture(scope="session")
def demo_engine(user_cache: Callable[[], Any]) -> Engine:
    """The demo model; skips where its file has not been fetched (`make model` fetches it)."""
    from kvfix.engine import Engine, run_gate
    from kvfix.engine.locate import demo_file
    from kvfix.errors import UnknownModelError

    with user_cache():
        try:
            demo_file()
        except UnknownModelError as error:
            pytest.skip(error.message)
        engine = Engine.open(None, device="cpu", dtype="float32")
        engine.key  # noqa: B018 - hashes the weights while the user's cache remembers them
        engine.gate_report = run_gate(engine)
    return engine
