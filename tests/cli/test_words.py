"""Numbers and texts as people read them, and JSON as programs do."""

import json

import pytest

from kvfix.cli import words
from kvfix.cli.output import Output
from kvfix.errors import UsageError


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (27_648_000, "27.6 MB"),
        (4.2e15, "4200 TB"),
    ],
)
def test_size(num_bytes, shown):
    assert words.size(num_bytes) == shown


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "-"),
        (0.314, "0.31 ms"),
        (0.995, "1.0 ms"),
        (9.94, "9.9 ms"),
        (9.95, "10 ms"),
        (999.4, "999 ms"),
        (999.5, "1.0 s"),
        (99_949, "99.9 s"),
        (125_000, "2 min 5 s"),
    ],
)
def test_duration(ms, shown):
    assert words.duration(ms) == shown


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        (None, ".2f", "-"),
        (-0.001, ".2f", "0.00"),
        (0.5, "+.2f", "+0.50"),
        (-0.001, "+.2f", "0.00"),
        (-1.0, ".2f", "-1.00"),
    ],
)
def test_figure(value, form, shown):
    assert words.figure(value, form) == shown


@pytest.mark.parametrize(("number", "shown"), [(1, "1 row"), (2, "2 rows"), (12345, "12,345 rows")])
def test_count(number, shown):
    assert words.count(number, "row") == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\nb", "a↵b"), ("a\tb", "a⇥b"), ("\x1b[31mred", "\\u001b[31mred"), ("a\u202eb", "a\\u202eb"), ("ö→漢", "ö→漢")],
)
def test_what_a_terminal_would_act_on_is_shown_as_signs(text, shown):
    assert words.visible(text) == shown
    assert words.safe("a\n\tb\x07") == "a\n\tb\\u0007"


@pytest.mark.parametrize(
    ("cut", "shown"), [(words.head, "abcd…"), (words.tail, "…ghij"), (words.middle, "ab…ij")], ids=lambda c: str(c)[:15]
)
def test_cuts(cut, shown):
    assert cut("abcdefghij", 5) == shown
    assert cut("abcde", 5) == "abcde"


@pytest.mark.parametrize(
    ("text", "amount"),
    [("0", 0), ("812", 812), ("1kB", 1000), ("500 MB", 500_000_000), ("20GB", 20 * 10**9), ("1.5GiB", 3 << 29)],
)
def test_sizes_given(text, amount):
    assert words.num_bytes(text, "--max-size") == amount


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 PB", "1e9", "many"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="--max-size"):
        words.num_bytes(text, "--max-size")


@pytest.mark.parametrize(
    ("text", "amount"), [("90s", 90), ("10m", 600), ("1h", 3600), ("2d", 172800), ("0", 0), ("1.5h", 5400)]
)
def test_seconds(text, amount):
    assert words.seconds(text, "--min-age") == amount


@pytest.mark.parametrize("text", ["", "-1", "1w", "1h30m", "h"])
def test_no_seconds(text):
    with pytest.raises(UsageError, match="--min-age"):
        words.seconds(text, "--min-age")


def test_json_is_rounded_and_finite(capsys):
    import numpy as np

    body = {
        "timing_ms": {"load": 1.23456, "none": None},
        "rows": [{"full_prefill_ms": {"median": 2.00049}, "mr": 0.123456}],
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "count": np.int64(3),
    }
    Output(json=True).document(body)
    assert json.loads(capsys.readouterr().out) == {
        "timing_ms": {"load": 1.235, "none": None},
        "rows": [{"full_prefill_ms": {"median": 2.0}, "mr": 0.123456}],
        "nan": None,
        "inf": None,
        "count": 3,
    }


def test_one_document_even_if_something_fails_afterwards(capsys):
    out = Output(json=True)
    out.document({"schema": "kvfix.x/1"})
    assert out.fail("unexpected", "too late", 1) == 1
    assert capsys.readouterr().out.count("\n") == 1


def test_half_a_surrogate_pair_is_still_json(capfdbinary):
    Output(json=True).fail("usage", "\udcff", 2)
    assert json.loads(capfdbinary.readouterr().out)["error"]["exit_code"] == 2
