"""Passes over rows: packed, chunked and scattered ones equal single whole ones, and touch nothing else."""

import numpy as np
import pytest
import torch

from kvfix.core import KVCache
from kvfix.engine import engine as engine_module
from kvfix.engine.gate import deviation
from kvfix.errors import DocumentError
from tests.tolerances import CACHE
from tests.zoo import ZOO


def ids_of(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 300, num_tokens)


def same_bits(one: KVCache, other: KVCache, rows=slice(None)) -> bool:
    return torch.equal(one.keys[:, :, rows], other.keys[:, :, rows]) and torch.equal(
        one.values[:, :, rows], other.values[:, :, rows]
    )


def copy_of(cache: KVCache) -> KVCache:
    return KVCache(cache.keys.clone(), cache.values.clone(), cache.token_ids.copy(), cache.origin.copy())


@pytest.mark.parametrize("name", ZOO)
def test_texts_of_5_50_and_500_tokens_in_one_pass_equal_single_ones(gated, name):
    engine = gated(name)
    texts = [ids_of(size, size) for size in (5, 500, 50)]
    for text, packed in zip(texts, engine.prefill_many(texts, room=3), strict=True):
        assert np.array_equal(packed.token_ids, text)
        assert packed.capacity == len(text) + 3
        assert deviation(packed, engine.prefill(text)) <= CACHE


def test_no_text_packs_to_nothing(gated):
    assert gated("llama").prefill_many([]) == []


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3", "gpt-oss", "cohere2", "gpt2"])
@pytest.mark.parametrize("rows", [1, 37, 64])
def test_chunks_equal_one_pass(gated, monkeypatch, name, rows):
    engine = gated(name)
    text = ids_of(130)
    whole = engine.prefill(text)
    monkeypatch.setattr(engine_module, "CHUNK_ROWS", rows)
    seen = []
    chunked = engine.prefill(text, progress=seen.append)
    assert seen == [min(rows, 130 - start) for start in range(0, 130, rows)]
    assert deviation(chunked, whole) <= CACHE


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt-oss", "cohere2"])
class TestRecompute:
    """The operator R: named rows anew, everything else bit for bit."""

    @pytest.fixture
    def stale(self, gated, name):
        return gated(name).prefill(ids_of(150), room=10)

    @pytest.mark.parametrize(
        "positions", [[0], [149], [7, 8, 9], [3, 70, 71, 149], list(range(60, 150)), list(range(150))], ids=len
    )
    def test_leaves_other_rows_as_they_are(self, gated, name, stale, positions):
        cache = copy_of(stale)
        cache.token_ids[positions] = ids_of(len(positions), 9)
        gated(name).recompute(cache, np.array(positions))
        others = np.setdiff1d(np.arange(cache.capacity), positions)
        assert same_bits(cache, stale, others)
        assert not same_bits(cache, stale, positions)

    def test_the_same_tokens_give_the_same_rows(self, gated, name, stale):
        cache = copy_of(stale)
        gated(name).recompute(cache, np.array([5, 6, 7, 50, 90, 91, 149]))
        assert deviation(cache, stale) <= CACHE

    def test_a_second_pass_over_the_same_rows_changes_nothing(self, gated, name, stale):
        """Each layer attends to fresh rows of its own layer already: two passes pay only where they take other rows."""
        cache, positions = copy_of(stale), np.array([5, 6, 7, 50, 90, 91, 149])
        cache.token_ids[[5, 6]] = [8, 9]
        gated(name).recompute(cache, positions)
        once = copy_of(cache)
        gated(name).recompute(cache, positions)
        assert same_bits(cache, once)

    def test_everything_gives_a_fresh_prefill(self, gated, name, stale):
        cache = copy_of(stale)
        cache.token_ids = ids_of(150, 3)
        gated(name).recompute(cache, np.arange(150))
        assert deviation(cache, gated(name).prefill(cache.token_ids)) <= CACHE

    def test_reads_nothing_behind_the_last_row(self, gated, name, stale):
        """Rows past the last recomputed one may not even be loaded yet."""
        engine, rows = gated(name), np.array([20, 21, 60, 61])
        expected, poisoned = copy_of(stale), copy_of(stale)
        poisoned.keys[:, :, 62:] = torch.nan
        poisoned.values[:, :, 62:] = torch.nan
        for cache in (expected, poisoned):
            cache.token_ids[20:22] = [8, 9]
            engine.recompute(cache, rows)
        assert same_bits(poisoned, expected, slice(0, 62))

    def test_several_documents_in_one_pass(self, gated, name, stale):
        engine = gated(name)
        other = engine.prefill(ids_of(40, 4))
        jobs = [
            (copy_of(stale), np.array([30, 31, 99])),
            (copy_of(other), np.arange(40)),
            (copy_of(stale), np.array([], np.int64)),
        ]
        for cache, positions in jobs:
            cache.token_ids[positions] = 11
        engine.recompute_many(jobs)
        for (cache, positions), before in zip(jobs, (stale, other, stale), strict=True):
            single = copy_of(before)
            single.token_ids[positions] = 11
            engine.recompute(single, positions)
            assert deviation(cache, single) <= CACHE
        assert same_bits(jobs[2][0], stale)


def test_one_document_is_chunked_as_by_itself_and_several_are_one_pass(gated, monkeypatch):
    engine = gated("llama")
    monkeypatch.setattr(engine_module, "CHUNK_ROWS", 8)
    passes, real = [], engine.compute
    monkeypatch.setattr(engine, "compute", lambda groups: passes.append(list(map(len, groups))) or real(groups))
    jobs = [(engine.new_cache(ids_of(20)), np.arange(20)) for _ in range(2)]
    engine.recompute_many(jobs[:1])
    assert passes == [[], [8], [8], [4]]
    passes.clear()
    engine.recompute_many(jobs)
    assert passes == [[20, 20]]
    assert deviation(jobs[0][0], jobs[1][0]) <= CACHE


def test_no_rows_change_nothing(gated):
    engine = gated("llama")
    cache = engine.prefill(ids_of(20))
    before = copy_of(cache)
    engine.recompute(cache, np.array([], np.int64))
    engine.recompute_many([(cache, np.array([], np.int64))])
    assert same_bits(cache, before)


def test_room_is_zero_and_inside_the_capacity(gated):
    cache = gated("llama").prefill(ids_of(20), room=7)
    assert (len(cache), cache.capacity) == (20, 27)
    assert not cache.keys[:, :, 20:].any()
    assert not cache.values[:, :, 20:].any()
    assert cache.row_bytes == 3 * 2 * 16 * 2 * 4
    assert cache.layer(1)[0].shape == (2, 20, 16)


def test_a_prefill_beyond_the_context_is_refused(gated):
    with pytest.raises(DocumentError, match="513 tokens"):
        gated("llama").prefill(ids_of(513))


def test_two_prefills_share_nothing(gated):
    engine = gated("llama")
    one, other = engine.prefill(ids_of(30)), engine.prefill(ids_of(30))
    one.keys.zero_()
    one.token_ids[:] = 0
    assert other.keys.abs().max() > 0
    assert np.array_equal(other.token_ids, ids_of(30))
