"""What records come to: nothing pooled that is not to be, seeds averaged first, every drop counted."""

import pytest
from scipy.stats import wilcoxon

from kvfix.bench.statistics import holm
from kvfix.bench.summary import summarise
from tests.bench.made import MODEL, own_record, record


def cell(body, **fields):
    (found,) = [c for c in body["cells"] if all(c[name] == value for name, value in fields.items())]
    return found


def test_means_medians_and_intervals():
    body = summarise([record(f"i{n}", "editlocal", mr=mr, flip=mr > 0.5) for n, mr in enumerate([0.2, 0.9, 1.0, 1.1])])
    found = cell(body, selector="editlocal")
    assert found["n"] == 4
    assert found["mr_mean"] == pytest.approx(0.8)
    assert found["mr_median"] == pytest.approx(0.95)
    assert found["flip_mean"] == 0.75
    low, high = found["mr_interval"]
    assert 0.2 <= low < 0.8 < high <= 1.1
    assert found["recompute_ms"] == 2.0


def test_seeds_are_averaged_before_anything_else():
    one = [record("a", "random", seed=seed, mr=mr) for seed, mr in enumerate([0.0, 0.0, 0.9])]
    other = [record("b", "random", seed=0, mr=0.5)]
    found = cell(summarise([*one, *other]), selector="random")
    assert found["n"] == 2
    assert found["mr_mean"] == pytest.approx(0.4)


def test_conditions_distances_ks_and_models_stay_apart():
    records = [
        record("a", "editlocal", mr=0.1),
        record("b", "editlocal", mr=0.2, condition="derived"),
        record("c", "editlocal", mr=0.3, condition="distance", distance=250),
        record("c", "editlocal", mr=0.4, condition="distance", distance=250, k=32),
        record("a", "editlocal", mr=0.5, model={**MODEL, "fingerprint": "another"}),
    ]
    body = summarise(records)
    assert [c["mr_mean"] for c in body["cells"]] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert body["comparisons"] == []
    assert [m["fingerprint"] for m in body["models"]] == [MODEL["fingerprint"], "another"]


def test_comparisons_are_paired_and_corrected_together():
    a, b, c = [0.9, 1.0, 1.02, 0.8, 1.1, 0.7], [0.1, 0.2, 0.99, 0.3, 0.2, 0.1], [0.5, 0.4, 0.6, 0.2, 0.9, 0.8]
    columns = {"a": a, "b": b, "c": c}
    records = [record(f"i{n}", name, mr=mr) for name, mrs in columns.items() for n, mr in enumerate(mrs)]
    body = summarise([*records, record("only-a", "a", mr=5.0), record("i0", "transplant:a", mr=1.0)])
    found = {(one["selector"], one["other"]): one for one in body["comparisons"]}
    assert list(found) == [("a", "b"), ("a", "c"), ("b", "c")]
    ps = [wilcoxon(columns[x], columns[y]).pvalue for x, y in found]
    assert [one["p"] for one in found.values()] == pytest.approx(ps)
    assert [one["p_holm"] for one in found.values()] == pytest.approx(holm(ps))
    first = found["a", "b"]
    assert first["n"] == 6
    assert (first["wins"], first["ties"], first["losses"]) == (5, 1, 0)
    assert first["mr_difference"] == pytest.approx(sum(x - y for x, y in zip(a, b, strict=True)) / 6)
    assert first["interval"][0] <= first["mr_difference"] <= first["interval"][1]


def test_each_condition_is_a_family_of_its_own():
    records = [
        record(f"{condition}{distance}{n}", name, condition=condition, distance=distance, mr=mr * n)
        for condition, distance in (("direct", 0), ("distance", 0), ("distance", 250))
        for n in range(1, 7)
        for name, mr in (("a", 0.3), ("b", 0.2))
    ]
    by_condition = {}
    for one in summarise(records)["comparisons"]:
        by_condition.setdefault(one["condition"], []).append(one)
    (direct,) = by_condition["direct"]
    assert direct["p_holm"] == direct["p"]
    assert [one["p_holm"] for one in by_condition["distance"]] == pytest.approx([2 * direct["p"]] * 2)


def test_what_is_dropped_is_counted_and_left_out():
    dropped = {"kept": False, "mr": None}
    records = [
        own_record("a"),
        own_record("b", kept=False, dropped_reason="fresh wrong", prefers_old=False),
        own_record("c", kept=False, dropped_reason="unusable: 900 tokens", margin_stale=None, severity=None),
        record("a", "editlocal"),
        record("b", "editlocal", **dropped),
        record("a", "wca", **dropped, dropped_reason="selector: not here"),
    ]
    body = summarise(records)
    (counts,) = body["items"]
    assert (counts["num_items"], counts["num_kept"]) == (3, 1)
    assert counts["dropped"] == {"fresh wrong": 1, "unusable": 1}
    assert counts["stale_failure_rate"] == 0.5
    assert counts["stale_failure_rate_kept"] == 1.0
    assert counts["flip_fresh_rate"] == 1.0
    assert [c["selector"] for c in body["cells"]] == ["editlocal"]


def test_severity_is_told_from_features_out_of_fold():
    records = [own_record(f"i{n}", severity=0.5 * n, drift=2.0 * n, tokens_changed=1) for n in range(20)]
    (found,) = summarise(records)["staleness"]
    assert found["num_items"] == 20
    assert found["severity_median"] == pytest.approx(4.75)
    assert found["spearman"] == {
        "tokens_changed": None,
        "distance": None,
        "drift": pytest.approx(1.0),
        "all": pytest.approx(1.0),
    }


def test_a_feature_that_was_not_measured_everywhere_is_left_out():
    (found,) = summarise([own_record("a"), own_record("b", drift=None)])["staleness"]
    assert set(found["spearman"]) == {"tokens_changed", "distance", "all"}


@pytest.mark.parametrize(("flags", "expected"), [([True, True], True), ([True, False], False), ([None], None)])
def test_checks(flags, expected):
    records = [record(f"i{n}", "editlocal", upstream_unchanged=flag) for n, flag in enumerate(flags)]
    checks = summarise([own_record("a", upstream_error=3e-6), own_record("b"), *records])["checks"]
    assert checks["upstream_unchanged"] is expected
    assert checks["upstream_max_abs_error"] == 3e-6


def test_of_nothing():
    body = summarise([])
    assert body["schema"] == "kvfix.items/1"
    assert body["cells"] == body["items"] == body["comparisons"] == body["models"] == []
