"""Bounds and shares, from ceilings made by hand; and the measuring itself, on small buffers."""

import math

import pytest

from kvfix.bench import ceilings, disk
from kvfix.bench.ceilings import Ceilings, bandwidths, product_rate
from kvfix.bench.counts import Counts, Work
from kvfix.bench.disk import DiskCeilings, measure_disk
from kvfix.bench.roofline import Roofline, bound

MADE = Ceilings(operations_per_s=1e9, read_bytes_per_s=1e6, copy_bytes_per_s=2e6)
DISK = DiskCeilings(
    write_bytes_per_s=1e6, small_write_ms=2.0, file_read_bytes_per_s=4e6, hash_bytes_per_s=2e6, copy_bytes_per_s=8e6
)


def test_the_slower_of_compute_and_memory_bounds():
    assert bound(Work(4_000_000, 1000, 500, 500), MADE) == {"bound_ms": 4.0, "bound_by": "compute"}
    assert bound(Work(1_000_000, 3000, 1000, 1000), MADE) == {"bound_ms": 5.0, "bound_by": "memory"}


def test_the_better_of_two_measurements_counts():
    assert MADE.higher(Ceilings(2e9, 5e5, 3e6)) == Ceilings(2e9, 1e6, 3e6)
    other = DISK._replace(write_bytes_per_s=2e6, small_write_ms=1.0, hash_bytes_per_s=1.0)
    assert DISK.better(other) == DISK._replace(write_bytes_per_s=2e6, small_write_ms=1.0)
    assert other.better(DISK) == DISK.better(other)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "bound_ms", "by"),
    [
        ("commit", 1000, 1.0 + 3 * 2.0, "disk"),
        ("load", 8000, 2.0, "memory"),
        ("check", 4000, 2.0, "hash"),
        ("transaction", 123, 2.0, "disk"),
    ],
)
def test_bounds_of_a_store(kind, num_bytes, bound_ms, by):
    assert DISK.bound(kind, num_bytes) == {"bound_ms": pytest.approx(bound_ms), "bound_by": by}


def test_a_commit_of_much_may_be_bound_by_its_hash():
    assert DISK._replace(write_bytes_per_s=1e9).bound("commit", 10**6)["bound_by"] == "hash"


@pytest.fixture
def small(monkeypatch):
    """Measure in an instant."""
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(ceilings, "_last_cache_bytes", lambda device: 0)
    monkeypatch.setattr(ceilings, "TRIED_S", 0.0)
    monkeypatch.setattr(ceilings, "ROWS", {"cpu": (2, 4)})
    monkeypatch.setattr(disk, "LARGE_BYTES", 1 << 16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_ceilings_are_those_of_the_models_own_modules(gated, small, name):
    engine = gated(name)
    roofline = Roofline(engine)
    first = roofline.ceilings
    assert all(math.isfinite(rate) and rate > 0 for rate in first)
    roofline.measure_again()
    assert all(now >= before for now, before in zip(roofline.ceilings, first, strict=True))
    told = roofline.beside(roofline.counts.prefill(9), 1e9)
    assert told["share"] == told["bound_ms"] / 1e9 > 0
    assert {"operations", "weight_bytes", "kv_read_bytes", "kv_written_bytes", "bound_ms", "share"} <= set(told)
    assert (roofline.describe()["assumed"] is not None) == (name == "mixtral")


def test_every_shape_counts_as_often_as_the_model_has_it(gated, monkeypatch):
    """With 1 ms a call, the rate follows from the shapes alone."""
    engine = gated("llama")
    monkeypatch.setattr(ceilings, "best_ms", lambda engine, work: work() is not None and 1.0)
    linears = Counts.of(engine).weights.linears
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 64 * 64 + 2 * 64 * 32
    assert product_rate(engine, linears) == pytest.approx(2 * 1024 * weights / (len(linears) * 1e-3))


def test_reading_is_no_slower_than_half_a_copy(gated, small, monkeypatch):
    engine, times = gated("llama"), iter([100.0, 1.0])
    monkeypatch.setattr(ceilings, "best_ms", lambda engine, work: next(times))
    read, copied = bandwidths(engine, engine.device)
    assert copied == pytest.approx(2 * (1 << 16) / 1e-3)
    assert read == copied / 2


def test_the_disk_is_measured_and_left_as_it_was(small, tmp_path):
    found = measure_disk(tmp_path, 7.0)
    assert all(math.isfinite(rate) and rate > 0 for rate in found)
    assert found.copy_bytes_per_s == 7.0
    assert list(tmp_path.iterdir()) == []
