"""What only a process of its own shows: terminals, pipes, and a build that is ended half-way."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from kvfix.store import Store

COMMAND = [sys.executable, "-c", "import sys; from kvfix.cli.app import main; sys.exit(main())"]


def on_a_terminal(arguments, command=COMMAND, **more):
    """The output of a command whose standard output and error are a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **more}
    process = subprocess.Popen([*command, *arguments], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    return process.wait(), b"".join(parts).decode()


@pytest.mark.parametrize(("more", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)], ids=["colour", "NO_COLOR"])
def test_colour_on_a_terminal(place, more, coloured):
    code, shown = on_a_terminal(["status", "--store", str(place.store)], **more)
    assert code == 0
    assert ("\x1b[" in shown) is coloured
    assert "3 documents" in shown


def test_none_in_a_pipe(place):
    done = subprocess.run([*COMMAND, "status", "--store", str(place.store)], capture_output=True, check=True)
    assert done.stdout == b""
    assert b"\x1b" not in done.stderr


def test_a_reader_that_goes_away_is_no_failure(place):
    process = subprocess.Popen(
        [*COMMAND, "status", "--store", str(place.store), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_output_that_cannot_be_written_is_one(place):
    """Data that nobody gets is told where people look, in one line."""
    for arguments in (["status", "--json"], ["sync", str(place.corpus), "--dry-run", "--json"]):
        with open("/dev/full", "w") as full:
            command = [*COMMAND, *arguments, "--store", str(place.store)]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, "error: cannot write standard output: No space left on device\n")


def test_a_log_that_cannot_be_written_stops_nothing(place):
    command = [*COMMAND, "sync", str(place.corpus), "--dry-run", "--json", "--log-format", "json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, "--store", str(place.store)], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1])["summary"]


def test_closed_streams(place):
    command = [*COMMAND, "status", "--store", str(place.store), "--json"]
    done = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], check=False)
    assert done.returncode == 0


def ended_half_way(arguments, corpus, store, num_pages):
    """How many documents are stored when a build or sync of so many pages is ended in the middle, all in order."""
    corpus.mkdir()
    for number in range(num_pages):
        (corpus / f"{number:03}.md").write_text(f"Page {number}. " + "The ferry leaves at noon. " * 30)
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while len(list(store.glob("records/*/*.json"))) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, b""), err
    assert err.decode().splitlines()[-1] == "error: interrupted by SIGTERM"
    assert list((store / "tmp").iterdir()) == []
    assert not (store / "lock.holder").exists()
    with Store.open(store) as opened, opened.writing("test"):
        assert opened.verify() == []
        return len(opened.documents())


def test_a_build_that_is_ended_keeps_what_is_done(tmp_path, model, kvfix):
    corpus, store = tmp_path / "docs", tmp_path / "store"
    words = ["build", str(corpus), "--store", str(store), "--model", model]
    done = ended_half_way(words, corpus, store, 150)
    assert 3 <= done < 150
    assert kvfix(*words, "--dry-run", "--json").json["totals"]["unchanged"] == done


def test_no_library_draws_a_bar_of_its_own(tmp_path):
    code = (
        "import sys; from kvfix.cli.app import main; main(['status', '--store', sys.argv[1], '--json']); "
        "from tqdm.auto import tqdm; list(tqdm(range(9)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "none"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
