"""Statistics against what they are said to be: direct loops, brute force, figures by hand."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from kvfix.bench import statistics
from kvfix.bench.extras import extra
from kvfix.bench.statistics import bootstrap_interval, holm, out_of_fold, score, wilcoxon
from kvfix.errors import UsageError


class TestBootstrap:
    def test_is_what_a_direct_loop_gives(self):
        values = np.random.default_rng(1).normal(0.5, 0.3, 20)
        rng = np.random.default_rng(2)
        means = [np.mean(rng.choice(values, len(values))) for _ in range(10_000)]
        assert bootstrap_interval(values) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.01)

    def test_every_resample_is_as_large_as_the_sample(self):
        shares = statistics._resamples(7)
        assert shares.shape == (10_000, 7)
        assert np.allclose(shares.sum(1), 1)
        assert np.allclose(shares * 7, np.round(shares * 7))

    def test_figures_of_the_same_items_are_paired(self):
        """What is 0.2 more for each item is so in each resample."""
        values = np.random.default_rng(3).normal(size=15)
        low, high = bootstrap_interval(values)
        assert bootstrap_interval(values + 0.2) == pytest.approx((low + 0.2, high + 0.2))
        assert bootstrap_interval((values + 0.2) - values) == pytest.approx((0.2, 0.2))

    def test_of_one_item(self):
        assert bootstrap_interval(np.array([0.4])) == pytest.approx((0.4, 0.4))


class TestWilcoxon:
    @pytest.mark.parametrize("seed", range(4))
    def test_is_the_share_of_signs_as_extreme(self, seed):
        differences = np.random.default_rng(seed).normal(0.4, 1, 9)
        ranks = rankdata(np.abs(differences))
        below = ranks[differences < 0].sum()
        observed = min(below, ranks.sum() - below)
        sums = [ranks[np.array(signs)].sum() for signs in product([False, True], repeat=9)]
        extreme = np.mean([min(one, ranks.sum() - one) <= observed for one in sums])
        assert wilcoxon(differences) == pytest.approx(extreme)

    def test_of_no_difference(self):
        assert wilcoxon(np.zeros(5)) == 1.0
        assert wilcoxon(np.array([0.3])) == 1.0


@pytest.mark.parametrize(
    ("ps", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.6, 0.7], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([0.01, 0.01, 0.9], [0.03, 0.03, 0.9]),
        ([], []),
    ],
)
def test_holm_by_hand(ps, expected):
    assert holm(ps) == pytest.approx(expected)


def test_a_small_difference_is_a_tie():
    assert score(np.array([0.06, 0.05, 0.0, -0.05, -0.051, -2.0])) == (1, 3, 2)


class TestOutOfFold:
    def test_is_what_a_direct_loop_gives(self):
        rng = np.random.default_rng(5)
        x = rng.normal(size=33)
        y = 0.5 * x + rng.normal(size=33)
        predicted = np.empty(33)
        for fold in np.array_split(np.random.default_rng(0).permutation(33), 5):
            others = [n for n in range(33) if n not in fold]
            slope, constant = np.polyfit(x[others], y[others], 1)
            predicted[fold] = slope * x[fold] + constant
        assert out_of_fold(x[:, None], y) == pytest.approx(spearmanr(predicted, y).statistic)

    def test_several_features_that_tell_all(self):
        features = np.random.default_rng(6).normal(size=(40, 3)) * [1, 1000, 1e-3]
        assert out_of_fold(features, features @ [1, 0.002, -1000]) == pytest.approx(1.0)

    def test_what_says_nothing(self):
        varied = np.arange(20.0)
        assert out_of_fold(np.ones((20, 2)), varied) is None
        assert out_of_fold(varied[:, None], np.ones(20)) is None
        assert out_of_fold(varied[:9, None], varied[:9]) is None
        assert out_of_fold(np.column_stack([varied, np.ones(20)]), varied) == pytest.approx(1.0)


def test_a_library_that_is_missing_is_named():
    with pytest.raises(UsageError, match=r"needs nosuchlibrary.*pip install 'kvfix\[bench\]'"):
        extra("nosuchlibrary.stats")
