"""bench store on a tiny model: its steps, what it leaves, what it refuses; no time is looked at."""

import json

import pytest

from kvfix.bench.stocked import Patch
from kvfix.bench.store import StoreOptions, run_store
from kvfix.errors import KVFixError, StoreNotWritableError, UsageError
from kvfix.store import Store

pytestmark = pytest.mark.usefixtures("single_words")


@pytest.fixture
def options(tmp_path):
    return StoreOptions(tmp_path, context=128, num_rows=6, documents=3, rounds=1)


def steps(body):
    return [(row["name"], row["patches"], row["moved"]) for row in body["rows"]]


def test_every_step_and_nothing_left_behind(gated, given_ceilings, options):
    engine = gated("llama")
    body = run_store(engine, options)
    json.dumps(body, allow_nan=False)
    assert body["schema"] == "kvfix.store/1"
    loads = [("load", 0, None), *(("load", number, moved) for number in (1, 8) for moved in (False, True))]
    upkeep = [(name, None, None) for name in ("sync unchanged", "verify", "gc")]
    assert steps(body) == [("commit base", None, None), ("commit patch", None, None), *loads, *upkeep]
    found = dict(zip(steps(body), body["rows"], strict=True))
    assert found["commit base", None, None]["data_bytes"] > 128 * engine.row_bytes
    assert 6 * engine.row_bytes < found["commit patch", None, None]["data_bytes"] < 12 * engine.row_bytes
    assert found["load", 0, None]["data_bytes"] == found["load", 8, False]["data_bytes"] == 128 * engine.row_bytes
    assert found["load", 8, True]["data_bytes"] == (128 + 8 * 4) * engine.row_bytes
    assert found["sync unchanged", None, None]["num_items"] == 3
    assert found["gc", None, None]["num_items"] >= 8, "a record each, at least"
    for row in body["rows"]:
        assert row["roofline"]["share"] == row["roofline"]["bound_ms"] / row["each_ms"]["median"]
    assert list(options.folder.iterdir()) == []


def test_rows_of_a_model_that_cannot_be_moved_are_not(gated, given_ceilings, options):
    assert not any(moved for _, _, moved in steps(run_store(gated("gpt2"), options)))


def test_a_damaged_store_has_no_times(gated, given_ceilings, options, monkeypatch):
    from kvfix.store.audit import Damage

    monkeypatch.setattr(Store, "verify", lambda self: [Damage(None, None, None, "objects/x", "its checksum differs")])
    with pytest.raises(KVFixError, match="its checksum differs; no times are reported"):
        run_store(gated("llama"), options)
    assert list(options.folder.iterdir()) == []


def test_a_disk_without_room_is_refused(gated, options, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(StoreNotWritableError, match="are needed and 1000 are free"):
        run_store(gated("llama"), options)
    assert list(options.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"folder": "nowhere"}, "is no directory"), ({"num_rows": 40}, "5 to 8 rows"), ({"num_rows": 2}, "5 to 8 rows")],
)
def test_what_makes_no_sense_is_refused(tmp_path, wrong, message):
    given = {"folder": tmp_path / wrong.get("folder", ""), "context": 128, "num_rows": wrong.get("num_rows", 6)}
    with pytest.raises(UsageError, match=message):
        StoreOptions(**given)


def test_a_patch_that_inserts_moves_what_stands_behind_it():
    import numpy as np

    patch = Patch.at(np.arange(10, 20), 3, 4, inserted=2)
    assert patch.token_ids.tolist() == [10, 11, 12, 13, 14, 13, 14, 15, 16, 17, 18, 19]
    assert patch.source.tolist() == [0, 1, 2, -1, -1, -1, -1, 5, 6, 7, 8, 9]
    assert patch.positions.tolist() == [3, 4, 5, 6]
