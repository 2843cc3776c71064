"""What a pass has to do at least, against numbers worked out by hand for tiny models."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfix.bench.counts import Counts, Weights, Work, linear_size, seen_keys

# hidden 64, 4 query and 2 key heads of 16, 96 in the middle, 3 layers: see tests/zoo.py
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
LAST = 64 * 64 + 2 * 64 * 32  # the last layer ends at its keys and values
LLAMA = 2 * (ATTENTION + 3 * 64 * 96) + LAST
NORMS = 2 * 2 * 64 + 64
ROW_BYTES = 2 * 2 * 16 * 4  # of one layer
PAIR = 2 * 4 * (16 + 16)  # operations of a query and a key, all heads


@pytest.fixture
def counts(gated):
    return lambda name: Counts.of(gated(name))


def test_a_window_of_a_grouped_query_model(counts):
    found = counts("llama").one_pass([np.array([10, 11, 12])])
    assert found == Work(
        operations=2 * 3 * LLAMA + 2 * PAIR * (11 + 12 + 13),
        weight_bytes=4 * (LLAMA + NORMS + 3 * 64),
        kv_read_bytes=2 * 13 * ROW_BYTES,
        kv_written_bytes=3 * 3 * ROW_BYTES,
    )
    assert found.num_bytes == found.weight_bytes + (2 * 13 + 3 * 3) * ROW_BYTES


def test_scattered_rows_see_all_that_stands_before_them(counts):
    found = counts("llama").one_pass([np.array([0, 49])])
    assert found.kv_read_bytes == 2 * 50 * ROW_BYTES
    assert found.operations == 2 * 2 * LLAMA + 2 * PAIR * (1 + 50)


def test_a_prefill_is_a_suffix_from_the_start(counts):
    llama = counts("llama")
    assert llama.prefill(30) == llama.suffix(0, 30) == llama.one_pass([np.arange(30)])
    assert llama.prefill(30).operations == 2 * 30 * LLAMA + 2 * PAIR * 30 * 31 // 2
    assert llama.suffix(20, 30).kv_read_bytes == llama.prefill(30).kv_read_bytes


def test_many_documents_share_one_reading_of_the_weights(counts):
    llama, rows = counts("llama"), np.array([7, 8])
    one, many = llama.one_pass([rows]), llama.one_pass([rows] * 5)
    assert many.operations == 5 * one.operations
    assert many.kv_read_bytes == 5 * one.kv_read_bytes
    assert many.weight_bytes == one.weight_bytes + 4 * 2 * 64 * 4
    assert one.joined(one).weight_bytes == 2 * one.weight_bytes


def test_no_rows_are_no_work(counts):
    assert counts("llama").one_pass([]) == Work(0, 0, 0, 0)


def test_windows_of_single_layers(counts):
    """The first layer sees 40 positions, the second sees all."""
    model = counts("gpt-oss")
    found, weights = model.one_pass([np.array([5, 100, 130])]), model.weights
    assert found.kv_read_bytes == ((6 + 40 + 30) + 131) * ROW_BYTES
    seen = (6 + 40 + 40) + (6 + 101 + 131)
    assert found.operations - 2 * 3 * (weights.products + weights.experts // 2) == PAIR * seen


def test_a_dense_model_with_its_own_kind_of_linear_layer(counts):
    weights = counts("gpt2").weights
    assert weights.products == 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 64 * 192
    assert weights.vectors == 2 * (192 + 64 + 256 + 64 + 4 * 64) + 192 + 2 * 64
    assert weights.embedded == 64 + 64, "tokens and positions"
    assert len(weights.linears) == 2 * 4 + 1


def test_experts_are_taken_in_part_by_one_row_and_read_in_full_by_many(counts):
    mixtral, experts = counts("mixtral"), 2 * 4 * 3 * 64 * 96
    dense = 2 * (ATTENTION + 4 * 64) + LAST
    assert (mixtral.weights.experts, mixtral.weights.products) == (experts, dense)
    one = mixtral.one_pass([np.array([0])])
    assert one.operations == 2 * (dense + experts // 2) + 2 * PAIR
    assert one.weight_bytes == 4 * (dense + NORMS + 64 + experts // 2)
    many = mixtral.prefill(60)
    assert many.weight_bytes == 4 * (dense + NORMS + 60 * 64 + experts)
    assert mixtral.one_pass([np.array([0, 1])]).weight_bytes == 4 * (dense + NORMS + 2 * 64 + experts * 3 // 4)


def test_biases_of_experts_are_no_matrices(counts):
    weights = counts("gpt-oss").weights
    assert weights.experts == 2 * 4 * (64 * 192 + 96 * 64)
    # attention with biases, its sinks, a router with one
    assert weights.products == 2 * (ATTENTION + 4 * 64) + LAST
    assert weights.vectors == NORMS + 2 * (64 + 32 + 32 + 64 + 4 + 4) + (64 + 32 + 32)


def test_packed_weights_count_as_dense_ones():
    from kvfix.engine.packed import PackedLinear, packs

    if not packs(torch.device("cpu"), torch.float32):
        pytest.skip("this processor packs nothing")
    found = []
    for make in (lambda *layers: layers, PackedLinear.of):
        weights = Weights()
        for module in make(torch.nn.Linear(8, 20), torch.nn.Linear(8, 4)):
            weights.add(module)
        found.append((weights.products, weights.vectors, [linear_size(one) for one in weights.linears]))
    # two that are multiplied as one are timed as one
    assert found == [(8 * 24, 24, [(8, 20), (8, 4)]), (8 * 24, 24, [(8, 24)])]


def test_half_precision_halves_the_bytes(gated):
    full, half = (Counts.of(gated("llama", dtype)).prefill(20) for dtype in ("float32", "bfloat16"))
    assert full.operations == half.operations
    assert full.num_bytes == 2 * half.num_bytes


@given(st.sets(st.integers(0, 60), min_size=1), st.none() | st.integers(1, 70))
def test_seen_keys_are_those_of_the_mask(positions, window):
    rows, keys = np.array(sorted(positions)), np.arange(61)
    mask = keys[None] <= rows[:, None]
    if window is not None:
        mask &= keys[None] > rows[:, None] - window
    assert seen_keys(rows, window) == (mask.sum(), mask.any(0).sum())
