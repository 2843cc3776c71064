"""What the records of a replay amount to: what the edits are like, and what each selector and k was worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvfix import metrics
from kvfix.bench.replay import SCHEMA
from kvfix.bench.texts import versions
from kvfix.metrics import KL_FLOOR
from kvfix.pipeline.measure import spread

if TYPE_CHECKING:
    from kvfix.bench.replay import Replay

FEW_TOKENS = 32
SMALL_SHARE = 0.1
Records = Sequence[dict[str, Any]]


def summary(replay: Replay) -> dict[str, Any]:
    """The last line of a replay's output (`kvfix.replay/1`, kind `summary`), over every record of its sample."""
    history, records = replay.history, replay.kept
    return {
        "schema": SCHEMA,
        "kind": "summary",
        "model": replay.engine.describe(),
        "versions": versions(),
        "history": {
            "num_commits": history.num_commits,
            "num_read": history.num_read,
            "num_merges": history.repository.num_merges(),
            "is_shallow": history.repository.is_shallow,
            "skipped": dict(sorted((history.skipped + replay.skipped).items())),
            "stopped": replay.stopped,
        },
        "edits": mix({(r["commit"], r["doc"]): r for r in records}.values()),
        "arms": [_arm(records, selector, k) for selector, k in replay.options.arms],
    }


def mix(edits: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the edits are like: shares of them, and medians. `edits` holds one record an edit."""
    found = list(edits)
    tokens = [edit["tokens"] for edit in found]
    outcomes = Counter(edit["outcome"] for edit in found)
    spans = [edit["num_spans"] for edit in found]
    changed = [t["changed"] for t in tokens]
    return {
        "num_edits": len(found),
        "num_rewritten": outcomes["rewritten"],
        "num_reprefilled": outcomes["reprefilled"],
        "num_renamed": sum(edit["renamed"] for edit in found),
        "length_preserving": metrics.rate(edit["length_preserving"] for edit in found),
        "one_span": metrics.rate(n == 1 for n in spans),
        "spans": _quantiles(spans),
        "grows": metrics.rate(t["new"] > t["old"] for t in tokens),
        "shrinks": metrics.rate(t["new"] < t["old"] for t in tokens),
        "changed_tokens": _quantiles(changed),
        "few_tokens": metrics.rate(n <= FEW_TOKENS for n in changed),
        "small_share": metrics.rate(t["changed"] < SMALL_SHARE * max(t["old"], t["new"]) for t in tokens),
        "document_tokens": _quantiles([t["new"] for t in tokens]),
        "edit_at": _quantiles([edit["edit_at"] for edit in found]),
    }


def _arm(records: Records, selector: str, k: int | str) -> dict[str, Any]:
    """One selector and k: what the cost model chose, and the repair's figures over all edits and over those it left.

    Edits that are not repaired whatever the selector count as the cost model's choice.
    """
    mine = [r for r in records if r["selector"] in (selector, None) and r["k"] in (k, None)]
    tried = [r for r in mine if r["selector"]]
    chosen = Counter(r["chosen"] for r in mine)
    return {
        "selector": selector,
        "k": k,
        "chosen": {name: chosen[name] for name in ("repair", "suffix", "full")},
        "all": _figures(tried),
        "where_repair_is_chosen": _figures([r for r in tried if r["chosen"] == "repair"]),
    }


def _figures(tried: Records) -> dict[str, Any]:
    """Sizes, quality and speed-ups over some edits; what was not measured is None."""
    worked = [r for r in tried if r["repaired_rows"]]
    rows = [r["repaired_rows"] for r in worked]
    measured = [r for r in tried if r["quality"]]
    probes = [probe for r in measured for probe in r["quality"]["probes"]]
    neutral = [r["quality"]["neutral"] for r in measured if r["quality"]["neutral"]]
    timed = [r for r in worked if r["speedup"]]
    return {
        "num_edits": len(tried),
        "rows": _quantiles(rows),
        "share_of_suffix": metrics.mean(r["repaired_rows"] / r["tokens"]["suffix"] for r in worked),
        "suffix_per_row": _quantiles([r["tokens"]["suffix"] / r["repaired_rows"] for r in worked]),
        "all_per_row": _quantiles([r["tokens"]["new"] / r["repaired_rows"] for r in worked]),
        "row_cost": metrics.median(map(_row_cost, timed)),
        "num_probes": len(probes),
        "mr_median": metrics.median(p["mr"] for p in probes),
        "mr_mean": metrics.mean(p["mr"] for p in probes),
        "num_mr": sum(p["mr"] is not None for p in probes),
        "mr_median_replaced": metrics.median(p["mr"] for p in probes if p["kind"] == "replaced"),
        "num_replaced": sum(p["kind"] == "replaced" for p in probes),
        "prefers_new_rate": metrics.rate(p["prefers_new"] for p in probes),
        "flip_rate": metrics.rate(p["flip"] for p in probes),
        "flip_rate_fresh": metrics.rate(p["flip_fresh"] for p in probes),
        "kl_touched": _kl(probes),
        "kl_neutral": _kl(neutral),
        "speedup_full": _spread([r["speedup"]["compute_vs_full"] for r in timed]),
        "speedup_suffix": _spread([r["speedup"]["compute_vs_suffix"] for r in timed]),
    }


def _row_cost(record: dict[str, Any]) -> float:
    """The time of a repaired row in that of a row of the suffix re-prefilled: what the cost model has to go by."""
    ms = record["timing_ms"]
    return ms["recompute"] / record["repaired_rows"] / (ms["suffix_prefill"] / record["tokens"]["suffix"])


def _kl(questions: Records) -> dict[str, Any]:
    """KL recovery over questions that the edit moves, and how many it hardly moves: under 0.005 nats a token."""
    asked = [q for q in questions if q["kl_stale"] is not None]
    return {
        "median": metrics.median(q["kl_recovery"] for q in asked),
        "num": sum(q["kl_recovery"] is not None for q in asked),
        "num_under_floor": sum(q["kl_stale"] < KL_FLOOR for q in asked),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, mean and 90th percentile."""
    import numpy as np

    if not values:
        return None
    return {
        "median": float(np.median(values)),
        "mean": float(np.mean(values)),
        "p90": float(np.percentile(values, 90)),
    }


def _spread(ratios: list[float]) -> dict[str, float] | None:
    """Median, 20th and 80th percentile, over edits."""
    if not ratios:
        return None
    return {name: value for name, value in spread(ratios).items() if name != "best"}
