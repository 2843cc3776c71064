"""The summary of a selector study as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvfix.bench.records import DIAGNOSTIC, TRANSPLANT
from kvfix.cli import words

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# what no budgeted selector is to be measured by: it recomputes everything, or knows the answers
NOT_RIVALS = ("exact", *DIAGNOSTIC)
COLUMNS = ("selector", "k", "n", "MR", "95% interval", "median", "flips", "KL", "rows", "select", "recompute")

Cell = dict[str, Any]


def said(body: dict[str, Any]) -> Iterator[RenderableType]:
    """A table for each model, condition and distance, what was dropped, and how wrong stale caches are."""
    for counts in body["items"]:
        place = {name: counts[name] for name in ("model", "condition", "distance")}
        cells = _at(body["cells"], place)
        model = next(model for model in body["models"] if model["fingerprint"] == counts["model"])
        yield _heading(counts, model)
        if cells:
            yield _table(cells, _at(body["comparisons"], place))
        yield ""
    for one in body["staleness"]:
        yield _foretold(one)
    yield _footnote(body)


def _at(rows: list[Cell], place: dict[str, Any]) -> list[Cell]:
    return [row for row in rows if all(row[name] == value for name, value in place.items())]


def _heading(counts: Cell, model: dict[str, str]) -> str:
    where = f", {words.count(counts['distance'], 'token')} from edit to answer" if counts["distance"] else ""
    dropped = "".join(f", {words.count(number)} {reason}" for reason, number in counts["dropped"].items())
    rates = ", ".join(
        f"{name} {_share(counts[key])}"
        for name, key in (
            ("stale caches prefer the old answer", "stale_failure_rate"),
            ("fresh flips", "flip_fresh_rate"),
            ("stale flips", "flip_stale_rate"),
        )
    )
    kept = f"{words.count(counts['num_kept'])} of {words.count(counts['num_items'], 'item')} kept{dropped}"
    return f"{counts['condition']}{where}, {words.visible(model['name'])}: {kept}\n{rates}"


def _table(cells: list[Cell], comparisons: list[Cell]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "selector" else "right", no_wrap=True)
    table.add_column("against the best", no_wrap=True)
    for k in sorted({cell["k"] for cell in cells}):
        if table.rows:
            table.add_row()
        ranked = [cell for cell in cells if cell["k"] == k]
        best = _best(ranked)
        for cell in ranked:
            table.add_row(*_figures(cell), _against(cell["selector"], best, k, comparisons))
    return table


def _best(cells: list[Cell]) -> str | None:
    """The selector of highest mean among those that choose within the budget and without the answers."""
    means = {cell["selector"]: cell["mr_mean"] for cell in cells if cell["mr_mean"] is not None}
    rivals = [name for name in means if name not in NOT_RIVALS and not name.startswith(TRANSPLANT)]
    return max(rivals, key=lambda name: means[name], default=None)


def _figures(cell: Cell) -> list[str]:
    low, high = cell["mr_interval"] or (None, None)
    return [
        cell["selector"],
        words.count(cell["k"]),
        words.count(cell["n"]),
        words.figure(cell["mr_mean"]),
        f"{words.figure(low)} to {words.figure(high)}",
        words.figure(cell["mr_median"]),
        _share(cell["flip_mean"]),
        words.figure(cell["kl_recovery_mean"]),
        words.figure(cell["rows_mean"], ".0f"),
        words.duration(cell["select_ms"]),
        words.duration(cell["recompute_ms"]),
    ]


def _against(selector: str, best: str | None, k: int, comparisons: list[Cell]) -> str:
    """Wins, ties and losses against the best, and Holm's p."""
    if selector == best:
        return "best"
    for one in comparisons:
        if one["k"] == k and {one["selector"], one["other"]} == {selector, best}:
            wins, losses = (one["wins"], one["losses"]) if one["selector"] == selector else (one["losses"], one["wins"])
            p = "p < 0.001" if one["p_holm"] < 0.001 else f"p {one['p_holm']:.3f}"
            return f"{wins} better, {one['ties']} tied, {losses} worse, {p}"
    return ""


def _foretold(one: Cell) -> str:
    known = {name.replace("_", " "): rho for name, rho in one["spearman"].items() if rho is not None}
    listed = ", ".join(f"{name} {words.figure(rho)}" for name, rho in known.items()) or "too few items, or all alike"
    median = words.figure(one["severity_median"])
    return (
        f"{one['condition']}: stale caches lose {median} nats (median of {words.count(one['num_items'], 'item')}); "
        f"told beforehand, as Spearman's correlation out of fold: {listed}"
    )


def _footnote(body: dict[str, Any]) -> str:
    checks = body["checks"]
    upstream = {True: "unchanged by every repair", False: "CHANGED by a repair", None: "no repair to check them by"}
    error = words.figure(checks["upstream_max_abs_error"], ".1e")
    return (
        f"rows before the edit: {upstream[checks['upstream_unchanged']]}, {error} from fresh ones at most\n"
        f"intervals from {words.count(body['resamples'])} bootstrap resamples; better and worse by more than "
        f"{body['tie_band']:g} of MR; p by Wilcoxon's paired test, Holm over all pairs of a model and condition"
    )


def _share(rate: float | None) -> str:
    return words.NONE if rate is None else f"{rate:.0%}"
