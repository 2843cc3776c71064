"""The parts of kvfix serve in this process: who is refused, what is kept, and what a client imports."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from kvfix import lean
from kvfix.cli.serving import address, client, wire
from kvfix.cli.serving.server import Server
from kvfix.cli.serving.warm import WarmEngines
from kvfix.errors import UsageError

HOW = {"device": "cpu", "dtype": "float32", "template": "plain", "notify": lambda line: None}


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """A server leaves the folder that it was started in."""
    monkeypatch.chdir(tmp_path)


class Nothing:
    """Keeps nothing warm, and counts how often it has forgotten it."""

    forgotten = 0

    def names(self):
        return []

    def forget(self):
        self.forgotten += 1


class Bench:
    """A server in this thread, and clients in others."""

    def __init__(self, path, command):
        self.told, self.warm = [], Nothing()
        self.server = Server(path, command, self.warm, lambda level, event, **fields: self.told.append((event, fields)))

    def run(self, *clients, idle_s=0.5):
        """What each client, called with the socket's path, returns, and why the server ended."""
        results = [None] * len(clients)

        def call(number):
            results[number] = clients[number](self.server.path)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(len(clients))]
        with self.server.listening():
            for thread in threads:
                thread.start()
            why = self.server.serve(idle_s)
        for thread in threads:
            thread.join(10)
        return results, why

    def events(self, name):
        return [fields for event, fields in self.told if event == name]


@pytest.fixture
def bench(tmp_path):
    return lambda command=lambda arguments: 0: Bench(tmp_path / "s.sock", command)


def body(**more):
    return {
        **client.identity(),
        "arguments": ["ask"],
        "directory": "/",
        "environment": dict(os.environ),
        "umask": 0o022,
        "encodings": ["utf-8"] * 3,
        **more,
    }


def asking(message, streams=3):
    """A client that sends one message, and returns all that it is told."""

    def ask(path):
        nothing = os.open(os.devnull, os.O_RDWR)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            wire.send(connection, message, [nothing] * streams)
            told = []
            while (said := wire.receive(connection)) is not None:
                told.append(said)
        os.close(nothing)
        return told

    return ask


def test_a_command_that_raises_does_not_end_the_daemon(bench):
    codes = iter([RuntimeError("boom"), 3])

    def command(arguments):
        code = next(codes)
        if isinstance(code, Exception):
            raise code
        return code

    table = bench(command)
    results, why = table.run(asking(body()), asking(body()))
    assert (sorted(said[-1]["exit"] for said in results), why) == ([1, 3], "idle")
    assert table.events("failed") == [{"message": "RuntimeError: boom"}]
    assert table.warm.forgotten == 1, "nobody knows in what state it left the engine"


def test_another_user_is_refused(bench, monkeypatch):
    monkeypatch.setattr(address, "peer_uid", lambda connection: os.getuid() + 1)
    table = bench(lambda arguments: pytest.fail("was run"))
    (told,), _ = table.run(asking(body()))
    assert told == [{"refused": f"user {os.getuid() + 1} is not the daemon's"}]
    assert table.events("refused")


def test_a_socket_of_another_user_gets_nothing(bench, monkeypatch, tmp_path):
    table = bench(lambda arguments: pytest.fail("was run"))

    def connect(path):
        monkeypatch.setattr(address, "peer_uid", lambda connection: os.getuid() + 1)
        return client.hand_over(path, ["ask", "--quiet"])

    assert table.run(connect)[0] == [None]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"kvfix": "0.0.1"}, "and this is 0.0.1 of"),
        ({"home": "/elsewhere/kvfix"}, "restart it"),
        ({"fixed": {**client.identity()["fixed"], "CUDA_VISIBLE_DEVICES": "7"}}, "another CUDA_VISIBLE_DEVICES"),
        ({"arguments": "ask"}, "unreadable request"),
        ({"arguments": ["a\0b"]}, "unreadable request"),
        ({"environment": {"A": 1}}, "unreadable request"),
        ({"encodings": []}, "unreadable request"),
        ({"umask": "0"}, "unreadable request"),
        ({"directory": "/nowhere/at/all"}, "cannot take its place: No such file"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_not_be_the_same_is_refused(bench, more, reason):
    table = bench(lambda arguments: pytest.fail("was run"))
    (told,), _ = table.run(asking(body(**more)))
    assert reason in told[0]["refused"]


def test_streams_are_missing(bench):
    (told,), _ = bench(lambda arguments: pytest.fail("was run")).run(asking(body(), streams=2))
    assert "three streams" in told[0]["refused"]


def test_a_command_has_the_clients_place_and_gives_it_back(bench, tmp_path):
    seen = {}

    def command(arguments):
        seen.update(arguments=arguments, directory=os.getcwd(), told=os.environ.get("TOLD"), umask=os.umask(0))
        os.umask(seen["umask"])
        print("for the client")
        return 0

    out = tmp_path / "out"

    def ask(path):
        with socket.socket(socket.AF_UNIX) as connection, out.open("w") as file, open(os.devnull) as nothing:
            connection.connect(str(path))
            streams = [nothing.fileno(), file.fileno(), file.fileno()]
            wire.send(connection, body(directory=str(tmp_path), environment={"TOLD": "yes"}, umask=0o027), streams)
            while wire.receive(connection):
                pass

    before, streams = dict(os.environ), (sys.stdout, sys.stderr)
    bench(command).run(ask)
    assert seen == {"arguments": ["ask"], "directory": str(tmp_path), "told": "yes", "umask": 0o027}
    assert out.read_text() == "for the client\n"
    assert (dict(os.environ), (sys.stdout, sys.stderr)) == (before, streams)


def test_a_folder_that_others_may_write_to(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    table = Bench(tmp_path / "open" / "s.sock", lambda arguments: 0)
    with pytest.raises(UsageError, match="others may write"):
        table.run()


class TestAddress:
    def test_only_some_verbs_and_only_when_asked(self):
        assert address.wanted(["edit", "x"], {}) is None
        assert address.wanted(["edit", "x"], {"KVFIX_SERVE": "0"}) is None
        assert address.wanted(["status", "--serve"], {"KVFIX_SERVE": "1"}) is None
        assert address.wanted([], {"KVFIX_SERVE": "1"}) is None
        assert address.wanted(["ask", "x"], {"KVFIX_SERVE": "/a/b.sock"}) == Path("/a/b.sock")
        assert address.wanted(["sync", "x", "--serve"], {"KVFIX_SERVE": "/a/b.sock"}) == Path("/a/b.sock")

    def test_the_users_own_folder(self, tmp_path):
        found = address.wanted(["edit", "x", "--serve"], {"XDG_RUNTIME_DIR": str(tmp_path)})
        assert found == tmp_path / "kvfix" / "serve.sock"
        other = address.wanted(["edit", "x"], {"XDG_RUNTIME_DIR": str(tmp_path / "none"), "KVFIX_SERVE": "1"})
        assert other == Path(f"/tmp/kvfix-{os.getuid()}/serve.sock")


class TestWarm:
    def test_an_engine_stays_until_its_files_change(self, zoo, tmp_path):
        folder = shutil.copytree(zoo("llama"), tmp_path / "llama")
        warm = WarmEngines(1)
        first = warm.open(str(folder), **HOW)
        first.gate_report, first.rotations = {"of": "a store"}, []
        assert warm.open(str(folder), **HOW) is first
        assert (first.gate_report, first.rotations) == (None, None), "the next store has to say it again"
        assert warm.open(str(folder), **{**HOW, "dtype": "bfloat16"}) is not first
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
        assert warm.open(str(folder), **HOW) is not first

    def test_what_is_let_go_of_is_freed(self, zoo, monkeypatch):
        monkeypatch.setattr(lean, "_wanted", True)
        warm = WarmEngines(1)
        held = weakref.ref(warm.open(str(zoo("llama")), **HOW).model)
        assert held() is not None
        warm.forget()
        assert held() is None

    def test_no_more_than_allowed(self, zoo):
        warm = WarmEngines(2)
        names = ["llama", "qwen2", "llama", "qwen3"]
        engines = [warm.open(str(zoo(name)), **HOW) for name in names]
        assert engines[0] is engines[2]
        assert warm.names() == ["llama", "qwen3"], "the one used longest ago goes"
        warm.forget()
        assert warm.names() == []


def test_a_client_imports_the_standard_library_alone(tmp_path):
    code = (
        "import sys; before = set(sys.modules)\n"
        "import kvfix.cli.entry, kvfix.cli.serving.client\n"
        "top = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "sys.exit(', '.join(top - set(sys.stdlib_module_names) - {'kvfix'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
