"""The error boundary: every failure is one message or one JSON document, and an exit code of the contract's table."""

import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvfix.api import KVFix
from kvfix.store import Store


def test_the_shape_of_an_error(kvfix):
    result = kvfix("status", "--json")
    assert (result.code, result.err) == (2, "")
    assert set(result.json) == {"schema", "error"}
    assert result.json["schema"] == "kvfix.error/1"
    assert set(result.json["error"]) == {"code", "message", "exit_code"}
    assert result.json["error"]["code"] == "store_missing"
    assert "kvfix build PATH" in result.json["error"]["message"]


USAGE = {
    "no such verb": (["frobnicate"], "No such command"),
    "no such option": (["status", "--colour"], "No such option"),
    "no value": (["edit", "x", "--k"], "--k"),
    "no argument": (["edit"], "DOC"),
    "too many": (["status", "a", "b"], "unexpected extra argument"),
    "not whole": (["edit", "x", "--k", "many"], "--k"),
    "below nothing": (["edit", "x", "--k", "-1"], "--k -1: expected a whole number, 0 or more"),
    "no number": (["edit", "x", "--min-mr", "nan"], "--min-mr"),
    "selector": (["edit", "x", "--selector", "best"], "editlocal"),
    "strategy": (["diff", "x", "--strategy", "best"], "auto, repair, suffix, full"),
    "on low": (["edit", "x", "--on-low", "shrug"], "exact, keep, fail"),
    "min-mr without oracle": (["edit", "x", "--min-mr", "1", "--no-verify"], "--no-verify"),
    "device": (["build", ".", "--device", "tpu"], "cuda"),
    "dtype": (["build", ".", "--dtype", "int8"], "float32"),
    "configuration": (["status", "--config", "none.toml"], "none.toml"),
    "sample": (["verify", "--sample", "0"], "--sample"),
    "bench": (["bench", "speed"], "No such command"),
    "time": (["edit", "x", "--lock-timeout", "-1"], "--lock-timeout"),
}


@pytest.mark.parametrize(("arguments", "said"), USAGE.values(), ids=USAGE)
def test_usage_errors(kvfix, monkeypatch, arguments, said):
    monkeypatch.setattr("kvfix.cli.verb.Run.engine", lambda self: pytest.fail("a model was loaded"))
    result = kvfix(*arguments, "--json")
    assert (result.code, result.json["error"]["exit_code"], result.err) == (2, 2, "")
    assert said.lower() in result.json["error"]["message"].lower()
    plain = kvfix(*arguments)
    assert (plain.code, plain.out) == (2, "")
    assert plain.err.startswith("error: ")
    assert plain.err.count("\n") == 1


def test_unknown_documents_and_models(place, at, kvfix):
    result = at("edit", "fery.md", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "unknown_document")
    assert "ferry.md" in result.json["error"]["message"]
    assert at("status", "elsewhere", "--json").code == 2
    place.write("new.md", "Never built.")
    assert "never built" in at("edit", place.corpus / "new.md").err
    result = kvfix("diff", "ferry.md", "--store", place.store, "--model", "./none", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "unknown_model")


def test_an_unreadable_document(place, at):
    place.write("ferry.md", b"caf\xe9")
    result = at("edit", "ferry.md", "--json")
    assert (result.code, result.json["error"]["code"]) == (3, "document")
    place.ferry.unlink()
    assert at("edit", "ferry.md").code == 3


@pytest.mark.parametrize("verb", [["edit", "ferry.md"], ["build", "."], ["gc"]], ids=lambda words: words[0])
def test_busy(place, at, verb):
    words = [place.corpus if word == "." else word for word in verb]
    with Store.open(place.store) as store, store.writing("refresh"):
        result = at(*words, "--lock-timeout", "0", "--json")
        assert at("status").code == 0
    assert (result.code, result.json["error"]["code"]) == (4, "store_busy")
    assert f"kvfix refresh, process {os.getpid()}" in result.json["error"]["message"]


def test_another_model(place, kvfix, zoo):
    other = zoo("llama", max_position_embeddings=2048, seed=1)
    place.replace("ferry.md", "30 crowns", "45 crowns")
    for words in (
        ["edit", "ferry.md"],
        ["diff", "ferry.md"],
        ["build", place.corpus],
        ["ask", "?", "--doc", "empty.md"],
    ):
        result = kvfix(*words, "--store", place.store, "--model", other, "--json")
        assert (result.code, result.json["error"]["code"]) == (5, "model_mismatch")
        assert "weights" in result.json["error"]["message"]


def test_another_dtype(place, at):
    result = at("diff", "ferry.md", "--dtype", "bfloat16", "--json")
    assert (result.code, result.json["error"]["code"]) == (5, "model_mismatch")
    assert "pass the --dtype it was built with" in result.json["error"]["message"]


def test_a_damaged_manifest(place, at):
    (place.store / "manifest.sqlite").write_bytes(b"nonsense" * 100)
    for words in (["status"], ["edit", "ferry.md"], ["verify"], ["build", place.corpus]):
        assert at(*words, "--json").json["error"]["exit_code"] == 6


def test_a_model_that_kvfix_would_garble(place, kvfix, zoo, tmp_path):
    result = kvfix("build", place.corpus, "--store", tmp_path / "s", "--model", zoo("mamba"), "--json")
    assert (result.code, result.json["error"]["code"]) == (8, "unsupported_model")


def test_a_full_disk(place, at, monkeypatch):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    usage = namedtuple("usage", "total used free")(1, 1, 0)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        for words in (["edit", "ferry.md"], ["build", place.corpus]):
            result = at(*words, "--json")
            assert (result.code, result.json["error"]["code"]) == (9, "store_not_writable")
    assert list((place.store / "tmp").iterdir()) == []
    assert at("verify").code == 0
    assert at("status", "--json").json["totals"]["stale"] == 1


def test_a_place_that_cannot_be_written(place, at, kvfix, model):
    result = kvfix("build", place.corpus, "--store", "/proc/none", "--model", model, "--json")
    assert (result.code, result.json["error"]["code"]) == (9, "store_not_writable")


def test_non_finite_rows(place, at, monkeypatch):
    from kvfix.engine import cache

    place.replace("ferry.md", "30 crowns", "45 crowns")
    real = cache.scatter_kv

    def spoiled(pack, layer, keys, values, **how):
        real(pack, layer, keys * float("nan"), values, **how)

    monkeypatch.setattr(cache, "scatter_kv", spoiled)
    result = at("edit", "ferry.md", "--no-verify", "--json")
    assert (result.code, result.json["error"]["code"]) == (1, "non_finite")


def test_the_unexpected_is_one_line(place, at, monkeypatch):
    def fail(self, path=None):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("kvfix.api.KVFix.status", fail)
    result = at("status", "--json")
    assert (result.code, result.json["error"]["code"], result.err) == (1, "unexpected", "")
    plain = at("status")
    assert plain.err == "error: RuntimeError: first line (KVFIX_DEBUG=1 shows where)\n"
    monkeypatch.setenv("KVFIX_DEBUG", "1")
    assert "Traceback" in at("status").err


@contextmanager
def handled_by(number: int, handler: object) -> Iterator[None]:
    """The process's own way with a signal, whatever the one that started the tests has set."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(place, at, monkeypatch, number, code):
    monkeypatch.setattr("kvfix.api.KVFix.status", lambda self, path=None: os.kill(os.getpid(), number))
    with handled_by(number, signal.default_int_handler):
        result = at("status", "--json")
        assert (result.code, result.json["error"]["code"]) == (code, "interrupted")
        assert signal.getsignal(number) is signal.default_int_handler


def test_an_interrupt_that_the_caller_ignores_stays_ignored(place, at, monkeypatch):
    real = KVFix.status
    seen = []
    monkeypatch.setattr(
        "kvfix.api.KVFix.status",
        lambda self, path=None: (seen.append(os.kill(os.getpid(), signal.SIGINT)), real(self, path))[1],
    )
    with handled_by(signal.SIGINT, signal.SIG_IGN):
        assert at("status", "--json").code == 0
    assert seen == [None]


def test_settings_come_from_the_file_above_the_corpus(place, kvfix, model):
    config = place.corpus / "kvfix.toml"
    config.write_text(f'store = "{place.store}"\nmodel = "{model}"\nk = 5\n')
    place.replace("ferry.md", "30 crowns", "45 crowns")
    assert kvfix("edit", place.ferry, "--dry-run", "--json").json["k"] == 5
    assert kvfix("edit", place.ferry, "--dry-run", "--k", "7", "--json").json["k"] == 7


def test_settings_from_the_environment(place, kvfix, model, monkeypatch):
    monkeypatch.setenv("KVFIX_STORE", str(place.store))
    assert kvfix("status", "--json").json["totals"]["documents"] == 3
