"""kvfix verify, gc, doctor and bench."""

import os

import pytest


def segment(place):
    return max(place.store.glob("objects/*/*.safetensors"), key=lambda path: path.stat().st_size)


def spoil(path):
    """Flip the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_sound_store(place, at):
    body = at("verify", "--json").json
    assert (body["schema"], body["ok"], body["damages"], body["deep"]) == ("kvfix.verify/1", True, [], None)
    assert body["num_documents"] == 3
    assert "as it was written" in at("verify").err
    assert at("verify", "--quiet").err == ""


def test_damage_is_named_with_file_and_document(place, at):
    spoil(segment(place))
    result = at("verify", "--json")
    assert result.code == 6
    [damage] = result.json["damages"]
    assert (damage["doc"], damage["path"]) == ("ferry.md", str(segment(place).relative_to(place.store)))
    assert result.json["ok"] is False
    quiet = at("verify", "--quiet")
    assert quiet.code == 6
    assert "needed by ferry.md" in quiet.err
    assert at("verify", place.corpus / "rules", "--json").code == 0


def test_deep(place, at):
    place.replace("ferry.md", "30 crowns", "45 crowns")
    assert at("edit", "ferry.md", "--strategy", "repair", "--no-verify", "--quiet").code == 0
    body = at("verify", "--deep", "--sample", "2", "--json").json
    assert [(check["doc"], check["ok"]) for check in body["deep"]] == [("ferry.md", True), ("rules/deck.md", True)]
    assert body["deep"][0]["error_stale"] > body["deep"][0]["error_exact"]
    assert "stale rows within" in at("verify", place.ferry, "--deep").err


def test_deep_finds_a_cache_that_is_not_what_it_claims(place, at, monkeypatch):
    monkeypatch.setattr("kvfix.pipeline.verify.TOLERANCE", {"float32": -1.0})
    result = at("verify", "--deep", "--sample", "1")
    assert result.code == 6
    assert "differs" in result.err


def test_gc(place, at):
    leftover = place.store / "tmp" / "1-dead"
    leftover.mkdir()
    (leftover / "new").write_bytes(b"x" * 5000)
    assert at("gc", "--json").json == {"schema": "kvfix.gc/1", "num_files": 0, "removed_bytes": 0}
    for path in (leftover / "new", leftover):
        os.utime(path, (0, 0))
    assert at("gc", "--min-age", "10m", "--json").json["removed_bytes"] == 5000
    assert "0 files removed" in at("gc").err
    assert at("gc", "--min-age", "soon").code == 2


def test_doctor(place, at):
    body = at("doctor", "--json").json
    assert body["schema"] == "kvfix.doctor/1"
    assert body["environment"]["devices"][0] == "cpu"
    store = body["store"]
    assert (store["exists"], store["readable"], store["writable"], store["num_documents"]) == (True, True, True, 3)
    assert store["error"] is None
    assert [built["name"] for built in store["models"]] == [body["model"]["name"]]
    assert (body["model"]["supported"], body["model"]["kept"]) == (True, True)
    assert body["model"]["gate"]["figures"]["prefill"] <= body["model"]["gate"]["tolerance"]
    shown = at("doctor").err
    for word in ("environment", "3 in 1 corpus", "passed", "3 layers half-split", "deviation"):
        assert word in shown


def test_doctor_without_a_store_runs_the_gate(kvfix, model, tmp_path):
    body = kvfix("doctor", "--model", model, "--store", tmp_path / "none", "--json").json
    assert (body["store"]["exists"], body["model"]["kept"], body["model"]["supported"]) == (False, False, True)
    assert not (tmp_path / "none").exists()


def test_doctor_without_a_model(kvfix):
    result = kvfix("doctor", "--json")
    assert (result.code, result.json["model"]) == (0, None)


def test_doctor_and_a_model_that_kvfix_would_garble(kvfix, zoo):
    result = kvfix("doctor", "--model", zoo("mamba"), "--json")
    assert result.code == 8
    assert result.json["model"]["supported"] is False
    assert result.json["model"]["error"]["code"] == "unsupported_model"
    assert "error: " in kvfix("doctor", "--model", zoo("mamba"), "--quiet").err


def test_doctor_and_a_damaged_store(place, at):
    (place.store / "manifest.sqlite").write_bytes(b"nonsense" * 100)
    result = at("doctor", "--json")
    assert result.code == 6
    assert result.json["store"]["error"]["code"] == "store_damaged"
    assert result.json["model"]["supported"] is True


def test_bench_latency(kvfix, monkeypatch):
    asked = []
    spread = {"median": 2.0, "p20": 1.0, "p80": 3.0, "best": 1.0}
    names = ("full_prefill_ms", "suffix_prefill_ms", "recompute_ms", "end_to_end_ms")
    names += ("speedup_full", "speedup_suffix", "speedup_end_to_end")
    row = {"context": 64, "k": 8, "span": 1, "max_abs_error_exact": 0.0, **dict.fromkeys(names, spread)}
    body = {"schema": "kvfix.latency/1", "rows": [row], "device": "cpu", "dtype": "float32"}
    body["versions"] = {"torch": "2", "threads": 1}
    monkeypatch.setattr("kvfix.bench.latency.run_latency", lambda *given: asked.append(given) or body)
    monkeypatch.setattr("kvfix.cli.verb.Run.engine", lambda self: "engine")
    arguments = ["bench", "latency", "--context", "64,128", "--k", "8", "--span", "1,2", "--rounds", "3"]
    assert kvfix(*arguments, "--json").json == body
    assert asked[0][:6] == ("engine", [64, 128], [8], [1, 2], 0.33, 3)
    assert "x suffix" in kvfix(*arguments).err


@pytest.mark.parametrize("given", [["--context", "many"], ["--k", "-1"], ["--span", ""], ["--rounds", "0"]])
def test_bench_latency_refuses_what_are_no_numbers(kvfix, given):
    assert kvfix("bench", "latency", *given, "--json").json["error"]["exit_code"] == 2
