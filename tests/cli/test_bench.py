"""kvfix bench latency, packed and store: what is asked of them, tables of 100 columns, what they refuse."""

from pathlib import Path

import pytest

from kvfix.bench.latency import Grid
from kvfix.bench.packed import PackedOptions
from kvfix.bench.store import StoreOptions

CEILINGS = {"operations_per_s": 123456e9, "read_bytes_per_s": 4321.1e9, "copy_bytes_per_s": 2e9}
COMMON = {
    "device": "cuda:0",
    "dtype": "bfloat16",
    "versions": {"torch": "2.13.0+cu130", "threads": 128},
    "ceilings": {**CEILINGS, "assumed": "128 experts, rows spread evenly"},
}


def spread(median):
    return {"median": median, "p20": median / 2, "p80": 2 * median, "best": median / 4}


def roofline(*names):
    told = {"operations": 1, "bound_ms": 0.123, "bound_by": "memory", "share": 0.4567}
    return dict.fromkeys(names, told)


@pytest.fixture
def latency_body():
    """Numbers as wide as they come."""
    times = ("full_prefill_ms", "suffix_prefill_ms", "recompute_ms", "end_to_end_ms")
    ratios = ("speedup_full", "speedup_suffix", "speedup_end_to_end")
    row = {
        "context": 131072,
        "k": 128,
        "span": 16,
        "edit_at": 104857,
        "max_abs_error_exact": 1e-5,
        "ratio_share": 0.789,
        "roofline": roofline("repair", "full", "suffix"),
        **dict.fromkeys(times, spread(90_100.0)),
        **dict.fromkeys(ratios, spread(123.0)),
    }
    return {"schema": "kvfix.latency/1", "rows": [row], **COMMON}


@pytest.fixture
def packed_body():
    row = {
        "documents": 64,
        "recomputed": 2112,
        "max_abs_error": 1e-6,
        "packed_ms": spread(9_990.0),
        "single_ms": spread(99_900.0),
        "packed_documents_per_s": 1234.5,
        "single_documents_per_s": 123.4,
        "speedup_packed": spread(9.9),
        "roofline": roofline("packed", "single"),
    }
    return {"schema": "kvfix.packed/1", "context": 1024, "k": 32, "rows": [row], **COMMON}


@pytest.fixture
def store_body():
    row = {
        "name": "load",
        "patches": 8,
        "moved": True,
        "num_items": 1,
        "data_bytes": 47.2e6,
        "each_ms": spread(9_990.0),
        "bytes_per_s": 999e9,
        "roofline": {"bound_ms": 123.4, "bound_by": "memory", "share": 0.12},
    }
    sync = row | {"name": "sync unchanged", "patches": None, "moved": None, "num_items": 1000}
    disk = {
        "write_bytes_per_s": 1e9,
        "small_write_ms": 2.0,
        "file_read_bytes_per_s": 5e9,
        "hash_bytes_per_s": 1e9,
        "copy_bytes_per_s": 2e10,
    }
    return {"schema": "kvfix.store/1", "rows": [row, sync], **COMMON, "ceilings": disk}


@pytest.fixture
def told(kvfix, monkeypatch):
    """`told(name, body, arguments)`: the command's result with and without --json, and what was asked for."""

    def call(name, body, *arguments):
        asked = []
        monkeypatch.setattr(f"kvfix.bench.{name}.run_{name}", lambda *given: asked.append(given) or body)
        monkeypatch.setattr("kvfix.cli.verb.Run.engine", lambda self: "engine")
        monkeypatch.setenv("COLUMNS", "100")
        assert kvfix("bench", name, *arguments, "--json").json == body
        shown = kvfix("bench", name, *arguments)
        assert (shown.code, shown.out) == (0, ""), shown.err
        return shown.err, asked[0][1]

    return call


def assert_fits(shown, *cells):
    """Every cell whole in a line of 100 columns at most, the header in one."""
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    for cell in cells:
        assert any(cell in line for line in lines), f"{cell}\n{shown}"
    assert "…" not in shown


def test_latency(told, latency_body):
    arguments = ["--context", "64,128,64", "--k", "8", "--span", "1,2", "--edit-at", "0.1,0.8", "--rounds", "3"]
    shown, grid = told("latency", latency_body, *arguments)
    assert grid == Grid([64, 128], [8], [1, 2], [0.1, 0.8], 3)
    assert_fits(shown, "x suffix", "131,072", "104,857", "90.1 s", "0.46", "0.79", "medians of 3 rounds on cuda:0")
    assert "128 experts, rows spread evenly" in " ".join(shown.split())


def test_packed(told, packed_body):
    shown, options = told("packed", packed_body, "--documents", "1,4", "--context", "100", "--k", "8", "--rounds", "2")
    assert options == PackedOptions([1, 4], 100, 8, 2)
    assert_fits(shown, "one by one", "2,112", "1234.5", "9.9x", "0.46")


def test_store(told, store_body, tmp_path):
    arguments = ["--store", tmp_path / "caches", "--context", "200", "--k", "6", "--documents", "7"]
    shown, options = told("store", store_body, *arguments)
    assert options == StoreOptions(tmp_path, 200, 6, 7, 5)
    assert_fits(shown, "load, 8 patches, moved", "sync unchanged (of 1000)", "47.2 MB", "memory")
    assert "2.0 ms a small durable write" in " ".join(shown.split())


def test_the_store_itself_is_not_touched(told, store_body, kvfix):
    told("store", store_body)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("latency", ["--context", "many"], "--context many: expected whole numbers"),
        ("latency", ["--k", "-1"], "--k -1"),
        ("latency", ["--span", ""], "--span"),
        ("latency", ["--rounds", "0"], "'--rounds'"),
        ("latency", ["--edit-at", "0.1,x"], "--edit-at 0.1,x: expected fractions"),
        ("latency", ["--edit-at", "1"], "--edit-at 1: expected fractions"),
        ("latency", ["--edit-at", "nan"], "--edit-at nan: expected fractions"),
        ("packed", ["--documents", "1,x"], "--documents 1,x: expected whole numbers"),
        ("packed", ["--documents", "0"], "at least one document"),
        ("packed", ["--context", "10"], "'--context'"),
        ("store", ["--k", "500"], "5 to 64 rows"),
        ("store", ["--store", "nowhere/caches"], "is no directory"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_model_is_loaded(kvfix, monkeypatch, name, given, said):
    monkeypatch.setattr("kvfix.cli.verb.Run.engine", lambda self: pytest.fail("opened a model"))
    error = kvfix("bench", name, *given, "--json").json["error"]
    assert error["exit_code"] == 2
    assert said in error["message"]
