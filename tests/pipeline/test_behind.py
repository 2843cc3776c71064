"""What runs behind the model: in order, within bounds, and nothing more once an error has ended the pass."""

import threading
import time

import pytest

from kvfix.errors import NonFiniteError, StoreNotWritableError
from kvfix.pipeline.behind import DEPTH, Behind, Computed, nothing_to_store


def fail(error):
    def commit():
        raise error

    return Computed(commit)


def writers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvfix-write")]


def test_pieces_are_stored_in_order_by_one_other_thread():
    threads = []
    with Behind(10**9) as behind:
        for n in range(5):
            behind.hand(Computed(lambda n=n: threads.append(threading.get_ident()) or n, 10))
        behind.hand(nothing_to_store("known"))
        assert list(behind.rest()) == [0, 1, 2, 3, 4, "known"]
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert writers() == []


def test_the_caller_goes_on_while_one_is_stored():
    gate = threading.Event()
    with Behind(100) as behind:
        behind.hand(Computed(lambda: gate.wait(10), 40))
        assert list(behind.results(60)) == []
        gate.set()
        assert list(behind.rest()) == [True]


@pytest.mark.parametrize(("room", "num_told"), [(40, 0), (41, 1), (100, 2), (1000, 2)])
def test_room_is_made_by_waiting(room, num_told):
    """Two pieces of 30 bytes wait, of 100 allowed; what is larger than all of it waits for both."""
    with Behind(100) as behind:
        gates = [threading.Event(), threading.Event()]
        for n, gate in enumerate(gates):
            behind.hand(Computed(lambda n=n, gate=gate: gate.wait(10) and n, 30))
        told = []
        waiting = threading.Thread(target=lambda: told.extend(behind.results(room)))
        waiting.start()
        for number, gate in enumerate(gates):
            waiting.join(0.05)
            assert waiting.is_alive() == (number < num_told)
            gate.set()
        waiting.join(10)
        assert told == list(range(num_told))
        assert list(behind.rest()) == list(range(num_told, 2))


def test_no_more_than_a_few_wait_however_small():
    gate = threading.Event()
    with Behind(10**9) as behind:
        for _ in range(DEPTH):
            behind.hand(Computed(lambda: gate.wait(10)))
        threading.Timer(0.05, gate.set).start()
        start = time.monotonic()
        assert next(behind.results()) is True
        assert time.monotonic() - start >= 0.04
        list(behind.rest())


def test_what_storing_raises_comes_at_its_turn_and_the_rest_is_stored():
    with Behind(100) as behind:
        for piece in (nothing_to_store(0), fail(NonFiniteError()), nothing_to_store(2)):
            behind.hand(piece)
        results = behind.rest()
        assert next(results) == 0
        with pytest.raises(NonFiniteError):
            next(results)
        assert list(behind.rest()) == [2]


def test_nothing_more_is_stored_after_what_ends_the_pass():
    stored = []
    gate = threading.Event()

    def full():
        gate.wait(10)
        raise StoreNotWritableError

    def story():
        with Behind(100) as behind:
            behind.hand(Computed(full))
            behind.hand(Computed(lambda: stored.append(1)))
            gate.set()
            list(behind.rest())

    with pytest.raises(StoreNotWritableError):
        story()
    assert stored == []
    assert writers() == []


def test_leaving_stores_what_was_handed_over():
    stored = []

    def story():
        with Behind(100) as behind:
            for n in range(4):
                behind.hand(Computed(lambda n=n: time.sleep(0.01) or stored.append(n)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        story()
    assert stored == [0, 1, 2, 3]
    assert writers() == []


def test_a_quarter_of_the_free_memory_by_default(monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Found", (), {"available": 4000}))
    assert Behind(None).most_bytes == 1000
    assert Behind(7).most_bytes == 7
