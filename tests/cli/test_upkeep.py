"""kvfix verify, gc, compact, fsck, edit --undo and doctor."""

import os
import re
import signal

import pytest

from kvfix.cli.app import main
from kvfix.store import Store
from tests.operations.site import ended, forked
from tests.store.test_crash import interrupt


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
    body = at("gc", "--json").json
    stored = body.pop("stored_bytes")
    assert stored == sum(p.stat().st_size for kind in ("objects", "records") for p in place.store.glob(f"{kind}/*/*"))
    nothing = {"num_files": 0, "removed_bytes": 0, "num_versions": 0, "over_bytes": None}
    assert body == {"schema": "kvfix.gc/1", "dry_run": False, **nothing}
    for path in (leftover / "new", leftover):
        os.utime(path, (0, 0))
    assert at("gc", "--dry-run", "--json").json["removed_bytes"] == 5000
    assert leftover.exists()
    assert at("gc", "--min-age", "10m", "--json").json["removed_bytes"] == 5000
    assert "0 files removed" in at("gc").err
    assert at("gc", "--min-age", "soon").code == 2
    assert at("gc", "--max-size", "much").code == 2


def edited(place, at, *numbers):
    """Edit the fare time and again, without a look at the quality."""
    for number in numbers:
        place.write("ferry.md", re.sub(r"fare is \d+", f"fare is {number}", place.ferry.read_text()))
        assert at("edit", "ferry.md", "--no-verify", "--quiet", "--keep", "5", "--strategy", "repair").code == 0


def kept(place):
    with Store.open(place.store, read_only=True) as store:
        return [n for n in range(1, 12) if store.version(str(place.corpus), "ferry.md", n)]


def test_how_many_versions_are_kept(place, at, monkeypatch):
    edited(place, at, 31, 32, 33, 34)
    assert kept(place) == [1, 2, 3, 4, 5]
    assert at("gc", "--json").json["num_versions"] == 0
    assert at("gc", "--keep", "3", "--dry-run", "--json").json["num_versions"] == 1
    monkeypatch.setenv("KVFIX_KEEP", "3")
    assert at("gc", "--json").json["num_versions"] == 1
    assert kept(place) == [2, 3, 4, 5]
    monkeypatch.setenv("KVFIX_KEEP", "0")
    place.replace("ferry.md", "noon", "dawn")
    assert at("edit", "ferry.md", "--no-verify", "--quiet").code == 0
    assert kept(place) == [6]
    assert at("gc", "--keep", "-1").code == 2


def test_gc_to_a_size(place, at):
    edited(place, at, 31, 32)
    whole = at("gc", "--json").json["stored_bytes"]
    body = at("gc", "--max-size", f"{whole - 1}", "--json").json
    assert (body["num_versions"], body["over_bytes"]) == (1, 0)
    assert kept(place) == [2, 3]
    result = at("gc", "--max-size", "1kB")
    assert (result.code, kept(place)) == (0, [3])
    assert "more than 1kB: newest versions" in result.err
    assert at("verify").code == 0


def test_compact(place, at):
    edited(place, at, 31, 32)
    planned = at("compact", "--dry-run", "--json").json
    assert planned["totals"] == {
        "documents": 3, "compacted": 0, "planned": 1, "unchanged": 2, "failed": 0, "freed_bytes": None,
    }  # fmt: skip
    before = at("gc", "--json").json["stored_bytes"]
    body = at("compact", "--keep", "0", "--json").json
    assert body["schema"] == "kvfix.compact/1"
    [ferry] = [document for document in body["documents"] if document["doc"] == "ferry.md"]
    assert (ferry["outcome"], ferry["num_patches"], ferry["version"]) == ("compacted", 2, 3)
    assert ferry["after_bytes"] < ferry["before_bytes"]
    assert body["totals"]["freed_bytes"] == before - at("gc", "--json").json["stored_bytes"] > 0
    assert at("compact").err.strip() == "3 documents: 3 unchanged"
    assert at("verify", "--deep", "--sample", "3").code == 0
    assert at("status", "--json").json["totals"]["stale"] == 0


def test_compact_below_a_path_with_previous_versions(place, at):
    edited(place, at, 31)
    assert at("compact", place.corpus / "rules", "--json").json["totals"]["unchanged"] == 1
    shown = at("compact", place.ferry).err
    assert "compacted ferry.md  1 patch" in shown
    assert "more for now: previous versions keep" in shown
    assert kept(place) == [1, 2]


def test_compact_and_a_damaged_document(place, at):
    edited(place, at, 31)
    spoil_text(segment(place))
    result = at("compact", "--json")
    assert (result.code, result.json["totals"]["failed"]) == (6, 1)
    assert "failed  ferry.md: " in at("compact", "--quiet").err


def spoil_text(path):
    """Flip bytes all over a segment."""
    content = bytearray(path.read_bytes())
    content[::64] = bytes(byte ^ 1 for byte in content[::64])
    path.chmod(0o644)
    path.write_bytes(content)


def test_undo(place, at):
    edited(place, at, 31)
    planned = at("edit", "ferry.md", "--undo", "--dry-run", "--json").json
    assert (planned["outcome"], planned["version"], planned["bytes"]["written_bytes"]) == ("planned", 2, None)
    file = place.ferry.read_bytes()
    body = at("edit", "ferry.md", "--undo", "--json").json
    assert (body["schema"], body["outcome"], body["version"]) == ("kvfix.edit/1", "restored", 3)
    assert (body["restored_version"], body["state"], body["debt"]["stale_rows"]) == (1, "stale", 0)
    assert body["reason"]
    assert "stale" in body["warnings"][0]
    assert place.ferry.read_bytes() == file
    assert at("status", place.ferry, "--json").json["documents"][0]["state"] == "stale"
    shown = at("edit", place.ferry, "--undo").err
    assert "restored  version 3 → 4  (it holds what version 2 held)" in shown
    assert "stale" not in shown
    assert at("verify").code == 0
    assert set(body) >= set(at("edit", "ferry.md", "--json").json)


def test_undo_where_nothing_is_kept(place, at):
    for words in (["--undo"], ["--undo", "--dry-run"]):
        result = at("edit", "ferry.md", *words, "--json")
        assert result.code == 2
        assert "no version before version 1 is kept" in result.json["error"]["message"]
    assert at("edit", "ferry.md", "--undo", "--measure").code == 2
    assert at("edit", "ferry.md", "--undo", "--text", "-").code == 2


def test_undo_does_not_bring_back_damage(place, at):
    edited(place, at, 31)
    spoil(segment(place))
    result = at("edit", "ferry.md", "--undo", "--json")
    assert result.code == 6
    assert kept(place) == [1, 2]


def test_fsck_of_a_sound_store(place, at):
    body = at("fsck", "--json").json
    assert body == {"schema": "kvfix.fsck/1", "ok": True, "damages": [], "unlisted": [], "rebuilt": None}
    assert "as it was written" in at("fsck").err
    assert at("fsck", "--dry-run").code == 2


@pytest.mark.parametrize("damage", [b"noise" * 999, b"", None], ids=["noise", "empty", "missing"])
def test_fsck_rebuild(place, at, damage):
    edited(place, at, 31)
    documents = at("status", "--json").json
    manifest = place.store / "manifest.sqlite"
    if damage is None:
        manifest.unlink()
    else:
        manifest.write_bytes(damage)
    result = at("fsck", "--json")
    assert result.code == 6
    assert result.json["damages"][0]["path"] == "manifest.sqlite"
    assert "fsck --rebuild" in at("fsck").err
    planned = at("fsck", "--rebuild", "--dry-run", "--json").json
    assert at("status").code == 6
    body = at("fsck", "--rebuild", "--json").json
    assert body["ok"] is True
    assert body["rebuilt"] | {"set_aside": None, "dry_run": True} == planned["rebuilt"]
    assert (body["rebuilt"]["num_documents"], body["rebuilt"]["num_versions"]) == (3, 4)
    assert bool(body["rebuilt"]["set_aside"]) == bool(damage)
    assert at("status", "--json").json == documents
    assert at("verify").code == 0
    assert at("edit", "ferry.md", "--undo").code == 0


def test_fsck_rebuild_names_what_is_lost(place, at):
    edited(place, at, 31)
    patch = min(place.store.glob("objects/*/*"), key=lambda path: -path.stat().st_mtime_ns)
    spoil(patch)
    assert at("fsck").code == 6
    result = at("fsck", "--rebuild", "--json")
    assert result.code == 6
    [loss] = result.json["rebuilt"]["losses"]
    assert (loss["doc"], loss["version"], loss["restored"]) == ("ferry.md", 2, 1)
    assert result.json["damages"][0]["path"] == str(patch.relative_to(place.store))
    assert at("status", place.ferry, "--json").json["documents"][0]["state"] == "stale"
    assert "left out  " in at("fsck", "--rebuild", "--quiet").err


def test_a_damaged_document_is_computed_again(place, at):
    edited(place, at, 31)
    for path in place.store.glob("objects/*/*"):
        spoil(path)
    assert at("fsck").code == 6
    assert at("build", place.corpus, "--force", "--quiet").code == 0
    assert at("gc", "--keep", "0", "--min-age", "0", "--quiet").code == 0
    assert at("verify").code == 0
    assert at("status", "--json").json["totals"]["exact"] == 3


def test_fsck_names_a_change_that_was_killed(place, at, model, tmp_path):
    def killed() -> int:
        interrupt(pytest.MonkeyPatch(), "transaction done", False, 1)
        return main(["edit", "ferry.md", "--no-verify", "--store", str(place.store), "--model", model])

    place.replace("ferry.md", "30 crowns", "45 crowns")
    assert ended(forked(killed, tmp_path / "log")) == -signal.SIGKILL
    result = at("fsck", "--json")
    assert result.code == 0
    [unlisted] = result.json["unlisted"]
    assert (unlisted["doc"], unlisted["version"]) == ("ferry.md", 2)
    assert "version 2 is whole but not in the manifest" in at("fsck").err


def test_fsck_without_a_store(kvfix, tmp_path):
    for words in (["fsck"], ["fsck", "--rebuild"]):
        assert kvfix(*words, "--store", tmp_path / "none", "--json").json["error"]["code"] == "store_missing"


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
