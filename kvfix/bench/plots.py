"""A study's figures as pictures: budget curves, selectors by distance, margin recovery against time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvfix.bench.extras import extra
from kvfix.bench.records import TRANSPLANT
from kvfix.errors import UsageError
from kvfix.metrics import median

# Okabe and Ito's palette, which colour-blind people tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
MARKERS = "osD^vPX"  # not as many as colours: a colour comes again with another marker
DASHES = ("-", "--", ":")
COLUMNS = 3
RECOVERY = "margin recovery (mean, 95% interval)"

Cell = dict[str, Any]


def draw(summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write each picture as PNG and SVG into `folder`; the files, in order.

    Three a model, but for those that would show nothing. Raises `UsageError` where matplotlib is missing or the folder
    cannot be written.
    """
    extra("matplotlib")
    cells = [c for c in summary["cells"] if c["mr_mean"] is not None and not c["selector"].startswith(TRANSPLANT)]
    order = list(dict.fromkeys(cell["selector"] for cell in cells))
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for model in summary["models"]:
            own = [cell for cell in cells if cell["model"] == model["fingerprint"]]
            stem = folder / f"{_slug(model['name'])}-{model['fingerprint'][:6]}"
            for name, picture in (("budget", _budget), ("distance", _distance), ("time", _time)):
                written += _saved(picture, own, order, f"{stem}-{name}", model["name"])
    except OSError as error:
        raise UsageError(f"{folder}: cannot write the pictures: {error.strerror}") from error
    return written


def _saved(
    picture: Callable[[Sequence[Cell], list[str]], Any], cells: list[Cell], order: list[str], stem: str, title: str
) -> list[Path]:
    """Draw one picture, where there is anything to draw, in both formats."""
    figure = picture(cells, order) if cells else None
    if figure is None:
        return []
    figure.suptitle(title, fontsize=11)
    paths = [Path(f"{stem}.{suffix}") for suffix in ("png", "svg")]
    # letters as text, and nothing that differs from run to run
    with extra("matplotlib").rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvfix"}):
        figure.savefig(paths[0], dpi=110)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _panels(titles: Sequence[str], x_label: str) -> tuple[Any, list[Any]]:
    """Axes, one a title, that share their margin recovery."""
    columns, rows = min(COLUMNS, len(titles)), -(-len(titles) // COLUMNS)
    figure = extra("matplotlib.figure").Figure(figsize=(1.6 + 3.6 * columns, 0.4 + 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x_label)
        for level in (0, 1):
            axis.axhline(level, color="0.75", linewidth=0.8, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(titles) :]:
        axis.remove()
    for first in grid[:, 0]:
        first.set_ylabel(RECOVERY, fontsize=9)
    return figure, axes[: len(titles)]


def _legend(figure: Any, axes: list[Any], order: list[str]) -> None:
    """The selectors' names beside the axes, each once."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    named = [name for name in order if name in handles]
    figure.legend([handles[name] for name in named], named, loc="outside right center", frameon=False, fontsize=9)


def _style(order: list[str], selector: str) -> dict[str, Any]:
    """Colour, marker and dash of a selector, the same in every picture."""
    index = order.index(selector)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "label": selector,
    }


def _budget(cells: Sequence[Cell], order: list[str]) -> Any:
    """Margin recovery against k, a panel for each condition and distance."""
    panels = _by(cells, _place)
    if max(len({cell["k"] for cell in panel}) for panel in panels.values()) < 2:
        return None
    figure, axes = _panels(list(panels), "k, rows per edited span")
    for axis, panel in zip(axes, panels.values(), strict=True):
        ks = sorted({cell["k"] for cell in panel})
        _curves(axis, panel, order, ks, "k")
    _legend(figure, axes, order)
    return figure


def _distance(cells: Sequence[Cell], order: list[str]) -> Any:
    """Margin recovery against the distance from edit to answer, a panel for each k; derived items stand at 0."""
    far = [cell for cell in cells if cell["condition"] == "distance"]
    if not far:
        return None
    ks, has_near = {cell["k"] for cell in far}, any(not cell["distance"] for cell in far)
    near = [cell for cell in cells if cell["condition"] == "derived" and cell["k"] in ks and not has_near]
    panels = _by([*near, *far], lambda cell: f"k = {cell['k']}")
    figure, axes = _panels(list(panels), "tokens from the edit to what the answer rests on")
    for axis, panel in zip(axes, panels.values(), strict=True):
        _curves(axis, panel, order, sorted({cell["distance"] for cell in panel}), "distance")
    _legend(figure, axes, order)
    return figure


def _curves(axis: Any, cells: Sequence[Cell], order: list[str], places: list[int], field: str) -> None:
    """One curve a selector over evenly spaced places, nudged apart so that intervals can be seen."""
    names = [name for name in order if any(cell["selector"] == name for cell in cells)]
    for number, name in enumerate(names):
        curve = sorted((c for c in cells if c["selector"] == name), key=lambda cell: cell[field])
        nudge = 0.3 * ((number + 0.5) / len(names) - 0.5)
        x = [places.index(cell[field]) + nudge for cell in curve]
        _points(axis, x, curve, **_style(order, name))
    axis.set_xticks(range(len(places)), [f"{place:,}" for place in places])


def _time(cells: Sequence[Cell], order: list[str]) -> Any:
    """Margin recovery against the milliseconds of select and recompute, a point for each k."""
    timed = [cell for cell in cells if cell["recompute_ms"] is not None]
    if not timed:
        return None
    panels = _by(timed, _place)
    figure, axes = _panels(list(panels), "select and recompute, ms (median)")
    for axis, panel in zip(axes, panels.values(), strict=True):
        for name in dict.fromkeys(cell["selector"] for cell in panel):
            curve = sorted((cell for cell in panel if cell["selector"] == name), key=lambda cell: cell["k"])
            x = [cell["recompute_ms"] + cell["select_ms"] for cell in curve]
            _points(axis, x, curve, **_style(order, name))
        _mark_time(axis, median(cell["full_prefill_ms"] for cell in panel))
    _legend(figure, axes, order)
    return figure


def _mark_time(axis: Any, full_prefill_ms: float | None) -> None:
    """Milliseconds on a logarithmic axis, and where a full prefill lies on it."""
    ticker = extra("matplotlib.ticker")
    axis.set_xscale("log")
    axis.axvline(full_prefill_ms, color="0.5", linewidth=0.8)
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    at = {"xy": (full_prefill_ms, 0.02), "xycoords": ("data", "axes fraction"), "ha": "right"}
    axis.annotate("full prefill", **at, rotation=90, fontsize=8, color="0.4")


def _points(axis: Any, x: list[float], curve: Sequence[Cell], **style: Any) -> None:
    means = [cell["mr_mean"] for cell in curve]
    spread = [
        [mean - cell["mr_interval"][0] for mean, cell in zip(means, curve, strict=True)],
        [cell["mr_interval"][1] - mean for mean, cell in zip(means, curve, strict=True)],
    ]
    axis.errorbar(x, means, yerr=spread, markersize=4.5, linewidth=1.2, elinewidth=0.8, capsize=0, **style)


def _by(cells: Sequence[Cell], panel_of: Callable[[Cell], str]) -> dict[str, list[Cell]]:
    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        panels.setdefault(panel_of(cell), []).append(cell)
    return panels


def _place(cell: Cell) -> str:
    return f"{cell['condition']}, {cell['distance']:,} tokens" if cell["distance"] else str(cell["condition"])


def _slug(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-." else "_" for char in Path(name).name)
