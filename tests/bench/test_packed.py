"""bench packed on a tiny model: rows, equality, memory; no time is looked at."""

import json

import numpy as np
import pytest

from kvfix.bench import packed
from kvfix.bench.counts import Counts
from kvfix.bench.packed import PackedOptions, run_packed
from kvfix.errors import DocumentError, KVFixError, UsageError

pytestmark = pytest.mark.usefixtures("single_words")


@pytest.fixture
def engine(gated):
    return gated("llama")


def test_a_row_for_every_number_of_documents(engine, given_ceilings):
    body = run_packed(engine, PackedOptions([4, 1], context=66, k=5, rounds=1))
    json.dumps(body, allow_nan=False)
    assert (body["schema"], body["context"], body["k"]) == ("kvfix.packed/1", 66, 5)
    assert [(row["documents"], row["recomputed"]) for row in body["rows"]] == [(1, 6), (4, 24)]
    counts, rows = Counts.of(engine), np.arange(22, 28)
    one = counts.one_pass([rows])
    for row, number in zip(body["rows"], (1, 4), strict=True):
        assert row["max_abs_error"] <= 1e-4
        assert row["packed_documents_per_s"] == number / row["packed_ms"]["median"] * 1e3
        assert row["single_documents_per_s"] == number / row["single_ms"]["median"] * 1e3
        together, alone = row["roofline"]["packed"], row["roofline"]["single"]
        assert together["weight_bytes"] == counts.one_pass([rows] * number).weight_bytes
        assert alone["weight_bytes"] == number * one.weight_bytes
        assert together["operations"] == alone["operations"] == number * one.operations


def test_documents_differ(engine):
    options = PackedOptions([2], context=66, k=5)
    (one, _), (other, _) = packed._job(engine, options, 0), packed._job(engine, options, 1)
    assert (one.token_ids != other.token_ids).any()
    assert not np.allclose(one.keys, other.keys)


def test_rows_that_a_packed_pass_leaves_out_or_mixes_up_are_seen(engine, given_ceilings, monkeypatch):
    options, many = PackedOptions([3], context=66, k=5, rounds=1), engine.recompute_many
    monkeypatch.setattr(engine, "recompute_many", lambda jobs: many(jobs[:-1]))
    with pytest.raises(KVFixError, match="no times are reported"):
        run_packed(engine, options)

    def mixed(jobs):
        many(jobs)
        (one, rows), (other, _) = jobs[:2]
        one.keys[:, :, rows] = other.keys[:, :, rows]

    monkeypatch.setattr(engine, "recompute_many", mixed)
    with pytest.raises(KVFixError, match="differs from single ones"):
        run_packed(engine, options)


def test_what_does_not_fit_into_memory_is_refused_first(engine, monkeypatch):
    monkeypatch.setattr(engine, "prefill", lambda *given, **more: pytest.fail("computed"))
    needed = 5 * 66 * engine.row_bytes
    monkeypatch.setattr(packed, "free_bytes", lambda device: needed)
    with pytest.raises(UsageError, match=r"5 documents of 66 tokens take .* lower --documents or --context"):
        run_packed(engine, PackedOptions([1, 5], context=66, k=5))
    monkeypatch.setattr(packed, "free_bytes", lambda device: 2 * needed)
    packed.require_memory(engine, 5, 66)


def test_free_memory_is_that_of_the_machine(engine):
    assert 0 < packed.free_bytes(engine.device) < 2**50


def test_a_context_beyond_the_model_is_refused(engine):
    with pytest.raises(DocumentError, match="takes at most"):
        run_packed(engine, PackedOptions([1], context=600, k=5))


def test_a_pass_has_a_document_and_a_document_some_tokens():
    with pytest.raises(UsageError, match="at least one document"):
        PackedOptions([0, 4], context=66, k=5)
    with pytest.raises(UsageError, match="no room for an edit in 3 tokens"):
        PackedOptions([1], context=3, k=5)
