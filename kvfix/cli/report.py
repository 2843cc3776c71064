"""The report of an edit, and of a difference, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvfix.cli import words
from kvfix.cli.layout import facts_grid, indented
from kvfix.cli.spans import span_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvfix.cost import Cost
    from kvfix.pipeline.quality import ProbeResult, Quality
    from kvfix.pipeline.report import EditReport

OUTCOMES = {"repaired": "green", "reprefilled": "green", "unchanged": "dim", "planned": "cyan", "failed": "red"}
FIGURES = ("stale", "repaired", "fresh", "MR", "prefers", "flip")
FIGURES_WIDTH = 48
STEPS = ("load", "diff", "align", "select", "recompute", "persist")
WAYS = {"repair": "a repair", "suffix": "an exact suffix", "full": "a full prefill"}


def report_lines(report: EditReport, width: int) -> Iterator[RenderableType]:
    """All of `kvfix edit`, for so many columns."""
    yield _title(report)
    if report.change is not None:
        yield from ("", span_table(report.change), "")
    if report.quality is not None and report.quality.counting:
        yield from (_probe_table(report.quality, width), "")
    facts = list(_facts(report))
    if facts:
        yield facts_grid(facts)
    for line in report.warnings:
        yield Text(f"warning: {line}", "yellow")


def diff_lines(report: EditReport) -> Iterator[RenderableType]:
    """All of `kvfix diff`."""
    yield _title(report, known=report.outcome == "unchanged")
    if report.change is None:
        return
    yield from ("", span_table(report.change, context=12), "")
    yield facts_grid(_plan_facts(report))


def _title(report: EditReport, known: bool = True) -> Text:
    text = Text(words.visible(report.document.doc_id), "bold")
    if known:
        text.append("  ").append(report.outcome, OUTCOMES.get(report.outcome, ""))
    if report.record is not None and report.outcome != "unchanged":
        text.append(f"  version {report.previous.version} → {report.record.version}", "default not bold")
    if report.reason and known:
        text.append(f"  ({report.reason})", "dim not bold")
    return text


def _facts(report: EditReport) -> Iterator[tuple[str, RenderableType]]:
    yield from _plan_facts(report)
    if report.quality is not None:
        yield "quality", _quality(report.quality)
    if any(value is not None for value in report.speedup().values()):
        yield "speed-up", _speedup(report)
    if report.record is not None and report.changed_bytes is not None:
        yield "bytes", _bytes(report)
    if report.clock.ms and report.outcome in ("repaired", "reprefilled"):
        yield "time", _timing(report)
    if report.record is not None and report.outcome != "unchanged":
        yield "debt", _debt(report)


def _plan_facts(report: EditReport) -> Iterator[tuple[str, RenderableType]]:
    """Tokens, cost and strategy."""
    change, plan, tokens = report.change, report.plan, report.tokens()
    if change is None or plan is None or tokens is None:
        return
    moved = "" if change.diff.length_preserving else f" ({tokens['new'] - tokens['old']:+,})"
    where = f"{tokens['span']:,} of them in {words.count(len(change.diff.spans), 'edited span')}"
    yield "tokens", f"{tokens['old']:,} → {tokens['new']:,}{moved}, {where}"
    what = f"{plan.strategy}, {plan.selector} with k {plan.k}" if plan.strategy == "repair" else plan.strategy
    rows = f"{words.count(tokens['recomputed'], 'row')} of {tokens['new']:,}"
    yield "recompute", f"{rows}, {tokens['token_layers']:,} token-layers ({what})"
    yield "cost", _cost(change.cost(len(plan.positions)), plan.strategy)
    if plan.reason:
        yield "because", plan.reason


def _cost(cost: Cost, strategy: str) -> str:
    rows = {"repair": cost.repair, "suffix": cost.suffix, "full": cost.full}
    return ", ".join(
        f"{WAYS[name]} {words.count(rows[name], 'row')}" for name in rows if name != "repair" or strategy == "repair"
    )


def _probe_table(quality: Quality, width: int) -> RenderableType:
    """Two lines a probe: the question and its figures, then what the answer was and is."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("probe", no_wrap=True)
    for name in FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    room = max(width - FIGURES_WIDTH, 16)
    for probe in quality.counting:
        table.add_row(_probe_text(probe, room), *_probe_figures(probe))
    return indented(table)


def _probe_text(probe: ProbeResult, room: int) -> Text:
    # a lead ends where the answer begins; a question is known by its beginning
    cut = words.tail if probe.kind == "auto" else words.head
    text = Text(cut(words.visible(probe.question.strip()), room))
    old, new = (words.head(words.visible(answer.strip()), (room - 6) // 2) for answer in (probe.old, probe.new))
    text.append("\n   ").append(old or "nothing", "red").append(" → ", "dim").append(new or "nothing", "green")
    return text


def _probe_figures(probe: ProbeResult) -> Iterator[RenderableType]:
    for margin in (probe.margin_stale, probe.margin_repaired, probe.margin_fresh):
        yield words.figure(margin, "+.2f")
    yield words.figure(probe.mr)
    yield Text("new", "green") if probe.prefers_new else Text("old", "yellow")
    yield {True: Text("yes", "green"), False: Text("no", "yellow"), None: Text(words.NONE)}[probe.flip]


def _quality(quality: Quality) -> str:
    body = quality.to_json()
    number = body["num_probes"]
    untouched = f"{words.count(body['num_untouched'], 'given probe')} untouched by this edit"
    if not number:
        return untouched if body["num_untouched"] else "no probes: nothing leads up to the edit that could be asked"
    measured = f"MR {words.figure(body['mr_median'])} (median of {body['num_mr']})"
    said = [measured if body["num_mr"] else "MR not measured"]
    said.append(f"prefers the new text on {_share(body['prefers_new_rate'], number)}")
    if body["flip_rate"] is not None:
        said.append(f"answers with it on {_share(body['flip_rate'], number)}")
    if body["kl_recovery"] is not None:
        said.append(f"KL recovery {words.figure(body['kl_recovery'])}")
    if body["num_untouched"]:
        said.append(untouched)
    return ", ".join(said)


def _share(rate: float | None, number: int) -> str:
    return f"{round((rate or 0.0) * number)} of {number}"


def _speedup(report: EditReport) -> str:
    ratios, measured = report.speedup(), report.measured
    how = f"median of {measured['rounds']}" if measured else "timed once"
    said = []
    if ratios["compute_vs_full"] is not None:
        said.append(f"{words.ratio(ratios['compute_vs_full'])} in compute against a full prefill ({how})")
    if ratios["compute_vs_suffix"] is not None and measured:
        said.append(
            f"{words.ratio(ratios['compute_vs_suffix'])} in compute against re-prefilling from the edit on "
            f"({measured['suffix_baseline']}, {how})"
        )
    if ratios["end_to_end_vs_full"] is not None:
        whole = words.ratio(ratios["end_to_end_vs_full"])
        said.append(f"{whole} end to end against a full prefill and its durable write (timed once)")
    return "\n".join(said)


def _bytes(report: EditReport) -> str:
    record = report.record
    assert record is not None
    return (
        f"{words.size(record.written_bytes)} written for {words.size(report.changed_bytes)} changed; "
        f"the whole cache has {words.size(record.cache_bytes)}"
    )


def _timing(report: EditReport) -> str:
    times = report.timing_ms()
    said = ", ".join(f"{step} {words.duration(times[step])}" for step in STEPS if times[step] is not None)
    if times["total"] is not None:
        said += f" = {words.duration(times['total'])}"
    if times["full_prefill"] is not None:
        said += f"\na full prefill {words.duration(times['full_prefill'])}"
    return said


def _debt(report: EditReport) -> str:
    record = report.record
    assert record is not None
    if record.debt.stale_rows == 0:
        return "none: the cache equals a fresh prefill"
    return (
        f"{words.count(record.debt.stale_rows, 'row')} no longer equal a fresh prefill's, "
        f"{words.count(record.debt.edits_behind, 'edit')} behind at most"
    )
