"""Wall time by step: what a step holds inside it is not its own."""

import pytest

from kvfix.pipeline.clock import Clock, Deadline, shared


@pytest.fixture
def clock(monkeypatch) -> tuple[Clock, list[float]]:
    """A clock, and the seconds that it reads."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return Clock(), now


def test_a_step_entered_twice_adds_up(clock):
    times, now = clock
    for seconds in (1, 2):
        with times("load"):
            now[0] += seconds
        now[0] += 10
    assert times.ms == {"load": 3000.0}


def test_an_inner_step_counts_for_itself_alone(clock):
    times, now = clock
    with times("select"):
        now[0] += 1
        for _ in range(2):
            with times("load"):
                now[0] += 2
                with times("align"):
                    now[0] += 4
        now[0] += 8
    with times("recompute"):
        now[0] += 16
    assert times.ms == {"select": 9000.0, "load": 4000.0, "align": 8000.0, "recompute": 16000.0}


def fail(times: Clock, now: list[float]) -> None:
    with times("select"), times("load"):
        now[0] += 1
        raise ZeroDivisionError


def test_a_step_that_fails_is_timed(clock):
    times, now = clock
    with pytest.raises(ZeroDivisionError):
        fail(times, now)
    assert times.ms == {"select": 0.0, "load": 1000.0}


@pytest.mark.parametrize(("weights", "parts"), [((1, 3, 0), (1000.0, 3000.0, 0.0)), ((0, 0), (2000.0, 2000.0))])
def test_a_shared_step_is_given_out_by_weight(clock, weights, parts):
    _, now = clock
    clocks = [Clock({"load": 5.0, "recompute": 7.0}) for _ in weights]
    with shared("recompute", list(zip(clocks, weights, strict=True))):
        now[0] += 4
    assert [each.ms for each in clocks] == [{"load": 5.0, "recompute": 7.0 + part} for part in parts]


def fail_shared(times: Clock, now: list[float]) -> None:
    with shared("recompute", [(times, 1)]):
        now[0] += 1
        raise ZeroDivisionError


def test_a_shared_step_that_fails_is_timed(clock):
    times, now = clock
    with pytest.raises(ZeroDivisionError):
        fail_shared(times, now)
    assert times.ms == {"recompute": 1000.0}


def test_a_deadline_passes_once_and_none_never_does(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    never, at_once, later = Deadline(None), Deadline(0), Deadline(60)
    assert [d.passed for d in (never, at_once, later)] == [False, True, False]
    now[0] = 160.0
    assert [d.passed for d in (never, at_once, later)] == [False, True, True]
