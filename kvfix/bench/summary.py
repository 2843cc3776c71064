"""What a study's records come to: figures a selector, comparisons of selectors, staleness, and what was dropped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from kvfix import metrics
from kvfix.bench.records import STALE, TRANSPLANT, Record
from kvfix.bench.statistics import NUM_RESAMPLES, TIE_BAND, bootstrap_interval, holm, out_of_fold, score, wilcoxon

SCHEMA = "kvfix.items/1"
# what could tell beforehand how wrong a stale cache is
FEATURES = ("tokens_changed", "distance", "drift")
MEASURES = ("mr", "flip", "prefers_new", "kl_recovery", "rows", "recompute_ms", "select_ms", "full_prefill_ms")

PerItem = dict[str, dict[str, float]]  # item → measure → mean over seeds


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """The `kvfix.items/1` document. Conditions, distances and models are never pooled."""
    own = [record for record in records if record["selector"] == STALE]
    tried = [record for record in records if record["selector"] != STALE]
    cells = {key: _per_item(group) for key, group in _grouped(tried, "condition", "distance", "k", "selector").items()}
    return {
        "schema": SCHEMA,
        "models": list({record["model"]["fingerprint"]: record["model"] for record in records}.values()),
        "items": [_counts(key, group) for key, group in _grouped(own, "condition", "distance").items()],
        "cells": [_named(key, _figures(items)) for key, items in cells.items() if items],
        "comparisons": list(_comparisons(cells)),
        "staleness": [_staleness(key, group) for key, group in _grouped(own, "condition").items()],
        "checks": _checks(own, tried),
        "versions": list({str(r["versions"]): r["versions"] for r in own}.values()),
        "resamples": NUM_RESAMPLES,
        "tie_band": TIE_BAND,
    }


# ---- figures


def _grouped(records: Iterable[Record], *fields: str) -> dict[tuple, list[Record]]:
    """Records by model and `fields`, in the order in which they first come."""
    groups: dict[tuple, list[Record]] = defaultdict(list)
    for record in records:
        groups[(record["model"]["fingerprint"], *(record[field] for field in fields))].append(record)
    return groups


def _named(key: tuple, figures: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(("model", "condition", "distance", "k", "selector"), key, strict=False)) | figures


def _per_item(records: Iterable[Record]) -> PerItem:
    """Kept items' measures; several seeds of one item are averaged first."""
    seeds: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["kept"]:
            seeds[record["id"]].append(record)
    return {
        item: {name: mean for name in MEASURES if (mean := metrics.mean(r[name] for r in group)) is not None}
        for item, group in sorted(seeds.items())
    }


def _figures(items: PerItem) -> dict[str, Any]:
    """One selector at one k, over its kept items."""
    figures: dict[str, Any] = {"n": len(items)}
    for name in ("mr", "flip", "kl_recovery"):
        values = _values(items, name)
        figures[f"{name}_mean"] = float(values.mean()) if len(values) else None
        figures[f"{name}_interval"] = list(bootstrap_interval(values)) if len(values) else None
    figures["mr_median"] = metrics.median(_values(items, "mr"))
    figures["prefers_new_rate"] = metrics.mean(_values(items, "prefers_new"))
    figures["rows_mean"] = metrics.mean(_values(items, "rows"))
    for name in ("recompute_ms", "select_ms", "full_prefill_ms"):
        figures[name] = metrics.median(_values(items, name))
    return figures


def _values(items: PerItem, name: str) -> np.ndarray:
    return np.array([measures[name] for measures in items.values() if name in measures])


# ---- comparisons


def _comparisons(cells: dict[tuple, PerItem]) -> Iterator[dict[str, Any]]:
    """Every pair of selectors at the same k and distance; Holm over all pairs of one model and condition."""
    families: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for one, other in combinations(cells, 2):
        if one[:-1] == other[:-1] and not any(key[-1].startswith(TRANSPLANT) for key in (one, other)):
            compared = _compared(cells[one], cells[other])
            if compared is not None:
                named = _named(one[:-1], {"selector": one[-1], "other": other[-1], **compared})
                families[one[:2]].append(named)
    for family in families.values():
        for comparison, p in zip(family, holm([each["p"] for each in family]), strict=True):
            yield {**comparison, "p_holm": p}


def _compared(one: PerItem, other: PerItem) -> dict[str, Any] | None:
    """Margin recovery of two selectors over the items that both have; None where there are none."""
    shared = [item for item in one if item in other and "mr" in one[item] and "mr" in other[item]]
    if not shared:
        return None
    differences = np.array([one[item]["mr"] - other[item]["mr"] for item in shared])
    return {
        "n": len(shared),
        "mr_difference": float(differences.mean()),
        "interval": list(bootstrap_interval(differences)),
        **score(differences)._asdict(),
        "p": wilcoxon(differences),
    }


# ---- items


def _counts(key: tuple, own: Sequence[Record]) -> dict[str, Any]:
    """How many items there were, how many were dropped and why, and what fresh and stale caches say."""
    reasons = Counter(record["dropped_reason"].partition(":")[0] for record in own if not record["kept"])
    kept, usable = [r for r in own if r["kept"]], [r for r in own if r["margin_stale"] is not None]
    return _named(
        key,
        {
            "num_items": len(own),
            "num_kept": len(kept),
            "dropped": dict(reasons),
            "flip_fresh_rate": metrics.rate(record["flip_fresh"] for record in kept),
            "flip_stale_rate": metrics.rate(record["flip"] for record in kept),
            "stale_failure_rate": metrics.rate(record["prefers_old"] for record in usable),
            "stale_failure_rate_kept": metrics.rate(record["prefers_old"] for record in kept),
        },
    )


def _staleness(key: tuple, own: Sequence[Record]) -> dict[str, Any]:
    """How well cheap features tell the severity - the fresh cache's margin less the stale one's - beforehand.

    Over all items that the model can take, dropped or not.
    """
    usable = [record for record in own if record["margin_stale"] is not None]
    severity = np.array([record["severity"] for record in usable])
    known = [name for name in FEATURES if usable and all(record[name] is not None for record in usable)]
    columns = np.array([[float(record[name]) for name in known] for record in usable]).reshape(len(usable), len(known))
    alone = {name: out_of_fold(columns[:, [n]], severity) for n, name in enumerate(known)}
    return _named(
        key,
        {
            "num_items": len(usable),
            "severity_median": metrics.median(severity),
            "spearman": alone | {"all": out_of_fold(columns, severity) if known else None},
        },
    )


def _checks(own: Sequence[Record], tried: Sequence[Record]) -> dict[str, Any]:
    """Whether rows before the edit stayed as they were, and how far they lie from a fresh prefill's."""
    unchanged = [r["upstream_unchanged"] for r in tried if r["upstream_unchanged"] is not None]
    errors = [record["upstream_error"] for record in own if record["upstream_error"] is not None]
    return {
        "num_repairs": len(unchanged),
        "upstream_unchanged": all(unchanged) if unchanged else None,
        "upstream_max_abs_error": max(errors, default=None),
    }
