"""For random edits, k = everything equals a fresh prefill, and the rows before the edit are bit-identical."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfix.align import allocate, gather, turn
from kvfix.core import KVCache, RowMap, TokenDiff
from kvfix.diff import diff_tokens
from kvfix.engine.gate import deviation
from tests.tolerances import CACHE, TURNED

MODELS = ["llama", "mistral-window", "phi3-partial", "cohere2"]


@dataclass(frozen=True)
class Replacement:
    """Tokens `[start, start + length)` of the text at hand become `new`; places are taken modulo its length."""

    start: int
    length: int
    new: tuple[int, ...]

    def apply(self, ids: list[int]) -> list[int]:
        start = self.start % (len(ids) + 1)
        return [*ids[:start], *self.new, *ids[start + self.length :]]


# few different tokens: repeated content is where a diff may go wrong
tokens = st.integers(5, 20)
replacements = st.builds(Replacement, st.integers(0, 200), st.integers(0, 12), st.lists(tokens, max_size=12).map(tuple))
texts = st.lists(tokens, min_size=1, max_size=120)


def realigned(engine, stale: KVCache, diff: TokenDiff, ids: np.ndarray) -> KVCache:
    rows = RowMap.of_base(stale.origin).realigned(diff.source)
    cache = allocate(stale, rows, ids, 0, engine.device)
    gather(cache, rows, [stale])
    turn(cache, rows, engine.rotations)
    return cache


def check(engine, old: list[int], new: list[int]) -> None:
    old_ids, new_ids = np.array(old, np.int64), np.array(new, np.int64)
    stale, fresh = engine.prefill(old_ids), engine.prefill(new_ids)
    diff = diff_tokens(old_ids, new_ids)
    cache = realigned(engine, stale, diff, new_ids)
    # kept keys of the first layer depend on nothing but token and place
    kept = np.flatnonzero(diff.source >= 0)
    if len(kept):
        mine, theirs = cache.layer(0)[0][:, kept], fresh.layer(0)[0][:, kept]
        assert (mine - theirs).abs().max() <= TURNED * max(1.0, float(theirs.abs().max()))
    first = diff.first
    engine.recompute(cache, np.arange(first, len(new_ids)))
    assert deviation(cache, fresh) <= CACHE
    assert torch.equal(cache.keys[:, :, :first], stale.keys[:, :, :first])
    assert torch.equal(cache.values[:, :, :first], stale.values[:, :, :first])
    assert np.array_equal(cache.token_ids, new_ids)
    assert np.array_equal(cache.origin, np.arange(len(new_ids)))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40)
@given(old=texts, edits=st.lists(replacements, min_size=1, max_size=4))
def test_everything_recomputed_equals_a_fresh_prefill(gated, name, old, edits):
    new = old
    for edit in edits:
        new = edit.apply(new)
    check(gated(name), old, new or [5])


TEXT = [5 + n * n % 17 for n in range(90)]
EDGES = {
    "nothing": TEXT,
    "first token": [30, *TEXT[1:]],
    "before the first token": [30, 31, *TEXT],
    "first tokens gone": TEXT[7:],
    "last token": [*TEXT[:-1], 30],
    "the end gone": TEXT[:60],
    "all but the first gone": TEXT[:1],
    "appended": [*TEXT, 30, 31, 32],
    "all replaced": [30 + n % 7 for n in range(90)],
    "all replaced by more": [30 + n % 7 for n in range(120)],
    "all replaced by one": [30],
    "several spans": [*TEXT[:10], 30, *TEXT[11:40], *TEXT[45:70], 31, 32, 33, *TEXT[70:]],
    "grown and shrunk by the same": [*TEXT[:20], 30, 31, *TEXT[20:60], *TEXT[62:]],
    "doubled": TEXT * 2,
}


@pytest.mark.parametrize("name", [*MODELS, "gemma3", "smollm3", "glm-interleaved", "llama-yarn", "gpt-oss"])
@pytest.mark.parametrize("edge", EDGES)
def test_edges(gated, name, edge):
    check(gated(name), TEXT, EDGES[edge])


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(old=texts, edits=st.lists(replacements, min_size=2, max_size=6))
def test_edit_after_edit_equals_a_fresh_prefill(gated, name, old, edits):
    """Each repair starts from the last one's rows, not from a prefill."""
    engine = gated(name)
    cache = engine.prefill(np.array(old, np.int64))
    for edit in edits:
        new = np.array(edit.apply(cache.token_ids.tolist()) or [5], np.int64)
        diff = diff_tokens(cache.token_ids, new)
        cache = realigned(engine, cache, diff, new)
        engine.recompute(cache, np.arange(diff.first, len(new)))
    assert deviation(cache, engine.prefill(cache.token_ids)) <= CACHE
