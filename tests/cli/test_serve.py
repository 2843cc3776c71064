"""kvfix serve: what a command through a daemon does is what it does by itself, whatever becomes of either."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from kvfix.cli.serving import wire
from kvfix.store import Store
from tests.cli.daemons import KVFIX, Daemon, run, until, untimed
from tests.cli.test_process import on_a_terminal

HOOK = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())
time.sleep(600)
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    started = Daemon.start(tmp_path_factory.mktemp("daemon"))
    yield started
    assert started.end() == 0
    assert not started.socket.exists()


@pytest.fixture
def twin(place):
    """A second copy of the store, for the same command without the daemon."""
    other = place.store.with_name("twin")
    shutil.copytree(place.store, other)
    yield other
    shutil.rmtree(other)


@pytest.fixture
def hook(tmp_path):
    """A command that never ends, and the file that it writes when it begins."""
    script, mark = tmp_path / "hook.py", tmp_path / "begun"
    script.write_text(HOOK)
    return f"{sys.executable} {script} {mark}", mark


def same(done, plain, store, twin):
    """Exit code and both streams, but for times and the store's name."""
    assert untimed(done.stderr) == untimed(plain.stderr)
    assert untimed(done.stdout).replace(str(store), str(twin)) == untimed(plain.stdout)
    assert done.returncode == plain.returncode


@pytest.mark.parametrize(
    "form", [["--json"], [], ["--quiet"], ["--log-format", "json"]], ids=["json", "people", "quiet", "log"]
)
@pytest.mark.parametrize("verb", ["edit", "sync", "ask"])
def test_a_command_is_what_it_is_by_itself(daemon, place, twin, model, verb, form):
    if "--log-format" in form and verb != "sync":
        pytest.skip("keeps no log")
    place.replace("ferry.md", "30 crowns", "45 crowns")
    words = {
        "edit": ["edit", place.ferry],
        "sync": ["sync", place.corpus],
        "ask": ["ask", "What is the fare?", "--doc", place.ferry, "--stale-ok", "--max-new", 8],
    }[verb]
    words += ["--model", model, *form]
    done, plain = daemon.run(*words, "--store", place.store), run(*words, "--store", twin)
    if "--log-format" in form:
        strip = [
            [{**json.loads(line), "time": 0, "pid": 0, "store": 0, "timing_ms": 0} for line in told.stderr.splitlines()]
            for told in (done, plain)
        ]
        assert strip[0] == strip[1]
        return
    assert plain.returncode == 0, plain.stderr
    same(done, plain, place.store, twin)


@pytest.mark.parametrize(
    ("words", "code"), [(["edit", "--k", "some"], 2), (["edit", "missing.md"], 2), (["ask", " ", "--doc", "x"], 2)]
)
@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "people"])
def test_failures_are_too(daemon, place, words, code, form):
    done, plain = (each(*words, *form, "--store", place.store) for each in (daemon.run, run))
    assert plain.returncode == code
    same(done, plain, place.store, place.store)


def test_the_folder_the_environment_and_standard_input_are_the_clients(daemon, place, model):
    told = {"KVFIX_STORE": place.store.name, "KVFIX_MODEL": model, "KVFIX_SELECTOR": "editlocal"}
    text = place.ferry.read_text().replace("30 crowns", "45 crowns")
    words = [*KVFIX, "edit", "ferry.md", "--text", "-", "--json"]
    done = subprocess.run(
        words,
        cwd=place.store.parent,
        input=text,
        env={**daemon.environment, **told},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert (report["outcome"], report["selector"]) == ("repaired", "editlocal")
    assert done.stderr == ""


@pytest.mark.parametrize(("more", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)], ids=["colour", "NO_COLOR"])
def test_a_terminal_is_the_clients(daemon, place, model, more, coloured):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    words = ["edit", str(place.ferry), "--dry-run", "--store", str(place.store), "--model", model]
    code, shown = on_a_terminal(words, command=KVFIX, KVFIX_SERVE=str(daemon.socket), **more)
    assert (code, "no daemon" in shown) == (0, False)
    assert bool(re.search(r"\x1b\[[\d;]+m", shown)) is coloured


def test_a_reader_that_goes_away_is_no_failure(daemon, place, model):
    words = ["ask", "What is the fare?", "--doc", place.ferry, "--store", place.store, "--model", model, "--json"]
    process = daemon.begin(*words)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_client(daemon, place, model, hook, number):
    command, mark = hook
    place.replace("ferry.md", "30 crowns", "45 crowns")
    process = daemon.begin("sync", place.corpus, "--store", place.store, "--model", model, "--hook", command)
    until(mark.exists, "the hook")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (128 + number, f"error: interrupted by {number.name}")
    released(daemon, place, 128 + number)


def test_a_killed_client(daemon, place, model, hook):
    command, mark = hook
    place.replace("ferry.md", "30 crowns", "45 crowns")
    process = daemon.begin("sync", place.corpus, "--store", place.store, "--model", model, "--hook", command)
    until(mark.exists, "the hook")
    process.kill()
    process.communicate()
    released(daemon, place, 143)


def released(daemon, place, code):
    """The daemon goes on, and the store is as free as after any command."""
    until(lambda: daemon.events("request")[-1]["exit_code"] == code, "the end of the request")
    assert (daemon.process.poll(), list((place.store / "tmp").iterdir())) == (None, [])
    with Store.open(place.store) as opened, opened.writing("test"):
        assert opened.verify() == []


def test_two_clients_at_once(daemon, place, model):
    words = ["ask", "What is the fare?", "--doc", place.ferry, "--store", place.store, "--model", model, "--json"]
    clients = [daemon.begin(*words) for _ in range(3)]
    answers = [client.communicate(timeout=120)[0] for client in clients]
    assert [client.returncode for client in clients] == [0, 0, 0]
    assert len({json.loads(answer)["answers"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        wire.LENGTH.pack(9) + b"not json!",
        wire.LENGTH.pack(2) + b"[]",
        wire.LENGTH.pack(50) + b"{",
        wire.LENGTH.pack(2) + b"{}",
        b"\0",
        b"",
    ],
    ids=["another protocol", "no JSON", "no object", "cut short", "nothing asked", "a byte", "nothing"],
)
def test_garbage(daemon, data):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon.socket))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        said = wire.receive(connection)
    assert said is None if data == b"" else set(said) == {"refused"}
    assert run("serve", "--status", "--quiet", "--socket", daemon.socket).returncode == 0


def test_another_daemon_at_the_same_socket(daemon):
    done = run("serve", "--socket", daemon.socket, "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (4, "daemon_busy")
    assert daemon.socket.exists()


def test_status_in_figures(daemon):
    found = json.loads(run("serve", "--status", "--json", "--socket", daemon.socket).stdout)
    assert (found["schema"], found["pid"], found["running"]) == ("kvfix.serve/1", daemon.process.pid, None)
    assert found["resident_bytes"] > 1e6


def test_a_model_whose_file_has_changed_is_not_served_from_memory(daemon, place, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "model")
    words = ["ask", "What is the fare?", "--doc", place.ferry, "--store", place.store, "--model", copy, "--json"]
    assert daemon.run(*words).returncode == 0
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.with_name("new").write_bytes(content)
    os.replace(weights.with_name("new"), weights)
    done = daemon.run(*words)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (5, "model_mismatch")


def test_without_a_daemon_a_command_runs_by_itself(place, model, tmp_path):
    words = ["ask", "What is the fare?", "--doc", place.ferry, "--store", place.store, "--model", model]
    environment = {**os.environ, "KVFIX_SERVE": str(tmp_path / "none.sock")}
    plain, done, quiet = run(*words), run(*words, env=environment), run(*words, "--quiet", env=environment)
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    said, rest = done.stderr.split("\n", 1)
    assert said == f"no daemon at {tmp_path / 'none.sock'} (kvfix serve starts one): running here"
    assert (untimed(rest), quiet.stderr) == (untimed(plain.stderr), "")


def test_status_and_stop_without_a_daemon(kvfix, tmp_path):
    for option in ("--status", "--stop"):
        result = kvfix("serve", option, "--json", "--socket", tmp_path / "none.sock")
        assert (result.code, result.json["error"]["code"]) == (2, "no_daemon")


class TestEnds:
    """Daemons that are ended."""

    def test_while_a_command_runs(self, place, model, hook, tmp_path):
        daemon = Daemon.start(tmp_path / "daemon")
        command, mark = hook
        place.replace("ferry.md", "30 crowns", "45 crowns")
        process = daemon.begin("sync", place.corpus, "--store", place.store, "--model", model, "--hook", command)
        until(mark.exists, "the hook")
        waiting = daemon.begin(
            "ask", "What is the fare?", "--doc", place.ferry, "--store", place.store, "--model", model
        )
        until(lambda: status(daemon)["num_waiting"], "the second client")
        assert daemon.end() == 0
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err.splitlines()[-1]) == (143, "error: interrupted by SIGTERM")
        _, err = waiting.communicate(timeout=120)
        assert (waiting.returncode, err.splitlines()[0]) == (0, "kvfix serve is ending: running here")
        assert not daemon.socket.exists()
        assert daemon.events("end")[0]["reason"] == "SIGTERM"

    def test_when_idle_when_asked_and_after_one_that_was_killed(self, tmp_path):
        killed = Daemon.start(tmp_path / "daemon")
        killed.process.kill()
        killed.process.wait()
        assert killed.socket.exists()
        asked = Daemon.start(tmp_path / "daemon")
        until(lambda: len(asked.events("begin")) == 2, "the second daemon")
        assert asked.socket.stat().st_mode & 0o777 == 0o600
        assert run("serve", "--stop", "--socket", asked.socket).returncode == 0
        assert asked.process.wait(timeout=60) == 0
        idle = Daemon.start(tmp_path / "daemon", "--idle-timeout", "0.2s")
        assert idle.process.wait(timeout=60) == 0
        assert [event["reason"] for event in idle.events("end")] == ["asked to", "idle"]
        assert not idle.socket.exists()


def status(daemon):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(daemon.socket))
        wire.send(connection, {"ask": "status"})
        return wire.receive(connection)["status"]
