"""Measures: values by hand, and None where a figure would say nothing."""

import math

import pytest
import torch

from kvfix.metrics import cksim, flip, kl_mean, kl_recovery, margin, margin_recovery, mean, median, rate


def test_margin():
    assert margin(-0.5, -2.0) == 1.5
    assert margin(-0.5, None) == -0.5  # a pure insertion
    assert margin(None, -2.0) == 2.0  # a pure deletion
    assert margin(None, None) is None


@pytest.mark.parametrize(
    ("stale", "repaired", "fresh", "noise", "expected"),
    [
        (-2.0, 1.0, 2.0, 0.0, 0.75),
        (-2.0, 4.0, 2.0, 0.0, 1.5),  # unclipped above
        (-2.0, -3.0, 2.0, 0.0, -0.25),  # and below
        (2.0, 0.0, -2.0, 0.0, 0.5),
        (0.0, 0.03, 0.04, 0.0, None),
        (0.0, 0.5, 0.5, 0.06, None),
        (0.0, 0.5, 0.5, 0.04, 1.0),
        (None, 0.5, 0.5, 0.0, None),
        (math.nan, 0.5, 0.5, 0.0, None),
        (0.0, math.nan, 0.5, 0.0, None),
        (0.0, 0.5, math.inf, 0.0, None),
        (0.0, 0.5, 0.5, math.nan, None),
    ],
)
def test_margin_recovery(stale, repaired, fresh, noise, expected):
    assert margin_recovery(stale, repaired, fresh, noise) == expected


@pytest.mark.parametrize(
    ("continuation", "new", "old", "expected"),
    [
        (" 45 days.", " 45", " 30", True),
        (" 30 days.", " 45", " 30", False),
        (" 45, not 30", " 45", " 30", False),
        ("45", " 45", " 30", True),
        (" 300", " 300", " 30", None),
        (" 30", " 30", " 300", None),
        (" 30", " 30", " ", None),
        (" 30", "", " 30", None),
    ],
)
def test_flip(continuation, new, old, expected):
    assert flip(continuation, new, old) is expected


def test_kl_recovery_by_hand():
    fresh, stale = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert kl_mean(fresh, stale) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-5)
    assert kl_recovery(fresh, fresh, stale) == pytest.approx(1.0)
    assert kl_recovery(fresh, stale, stale) == pytest.approx(0.0)


def test_kl_is_the_mean_over_positions():
    fresh = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    other = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    assert kl_mean(fresh, other) == pytest.approx(kl_mean(fresh[:1], other[:1]) / 2)


def test_kl_recovery_says_nothing_on_a_small_or_undefined_gap():
    fresh, near = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.51, 0.49]]).log()
    assert kl_recovery(fresh, fresh, near) is None
    impossible = torch.tensor([[1.0, 0.0]]).log()
    assert kl_recovery(fresh, fresh, impossible) is None
    assert kl_recovery(fresh[:0], fresh[:0], near[:0]) is None


def test_kl_ignores_tokens_the_fresh_cache_excludes():
    fresh, other = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert kl_mean(fresh, other) == pytest.approx(math.log(2))


def test_kl_in_bf16_is_never_negative():
    torch.manual_seed(0)
    logprobs = (torch.randn(3, 50_000) * 3).log_softmax(-1).bfloat16()
    assert kl_mean(logprobs, logprobs) == pytest.approx(0.0, abs=1e-6)
    assert kl_mean(logprobs, (logprobs + 1).bfloat16()) >= -1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cksim(dtype):
    a = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [1.0, 1.0]]], dtype=dtype)  # [H=2, N=2, D=2]
    b = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[0.0, 3.0], [1.0, 1.0]]], dtype=dtype)
    similarity = cksim(a, b)
    assert similarity.dtype == torch.float32
    torch.testing.assert_close(similarity, torch.tensor([0.5, 0.5]))


def test_summaries_skip_what_was_not_measured():
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert mean([1.0, None, 2.0]) == 1.5
    assert rate([True, False, None, True, True]) == 0.75
    assert median([]) is mean([None]) is rate([None]) is None
