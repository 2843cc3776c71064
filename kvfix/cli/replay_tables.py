"""The summary of a replay as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvfix.cli import words

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SCOPES = {"all": "all", "where_repair_is_chosen": "chosen"}
SIZES = ("selector", "k", "repair", "suffix", "full", "rows", "of suffix", "suffix/rows", "all/rows")
QUALITIES = (
    "selector",
    "k",
    "edits",
    "MR",
    "prefers new",
    "flips",
    "fresh flips",
    "KL touched",
    "KL neutral",
    "x full",
    "x suffix",
)


def said(body: dict[str, Any], with_quality: bool) -> Iterator[RenderableType]:
    """What the edits are like, what the cost model chose, what repairs recover, and what was passed over."""
    from kvfix.cli.layout import facts_grid

    edits, history = body["edits"], body["history"]
    read = f"{words.count(history['num_read'])} of {words.count(history['num_commits'], 'commit')} read"
    if edits["num_edits"]:
        yield f"{words.count(edits['num_edits'], 'past edit')}, {read}"
        yield facts_grid(_facts(edits))
        yield _sizes(body)
        if with_quality:
            yield _qualities(body)
        yield _footnote(body, with_quality)
    else:
        yield f"no past edit of a document to replay, {read}"
    if history["skipped"]:
        listed = ", ".join(f"{words.count(number)} {reason}" for reason, number in history["skipped"].items())
        yield f"passed over: {listed}"
    if history["is_shallow"]:
        yield "a shallow clone: its history ends where it was cut off"


def _facts(edits: dict[str, Any]) -> Iterator[tuple[str, str]]:
    keep, grow, shrink = (_share(edits[name]) for name in ("length_preserving", "grows", "shrinks"))
    yield "length", f"{keep} keep it, {grow} grow, {shrink} shrink"
    median, p90 = (_number(edits["spans"], which) for which in ("median", "p90"))
    yield "spans", f"one in {_share(edits['one_span'])}; median {median}, 90th percentile {p90}"
    few, small = _share(edits["few_tokens"]), _share(edits["small_share"])
    yield "changed tokens", f"median {_number(edits['changed_tokens'])}; at most 32 in {few}"
    yield "", f"less than a tenth of the document in {small}"
    place = _share(edits["edit_at"]["median"])
    yield "documents", f"median {_number(edits['document_tokens'])} tokens, the first change {place} in"
    yield "not repaired", f"{edits['num_rewritten']} written anew, {edits['num_reprefilled']} beyond repair"


def _sizes(body: dict[str, Any]) -> Table:
    """What the cost model chose, and how much a repair recomputes."""
    table = _table(SIZES)
    for arm in body["arms"]:
        figures = arm["all"]
        table.add_row(
            arm["selector"],
            str(arm["k"]),
            *(words.count(arm["chosen"][name]) for name in ("repair", "suffix", "full")),
            _number(figures["rows"]),
            _share(figures["share_of_suffix"]),
            _number(figures["suffix_per_row"], form=".1f"),
            _number(figures["all_per_row"], form=".1f"),
        )
    return table


def _qualities(body: dict[str, Any]) -> Table:
    """What repairs recover, over all edits and over those where the cost model chooses to repair."""
    table = _table(QUALITIES)
    for arm in body["arms"]:
        for scope, name in SCOPES.items():
            figures = arm[scope]
            if figures["num_edits"]:
                table.add_row(
                    arm["selector"],
                    str(arm["k"]),
                    f"{name} {figures['num_edits']:,}",
                    words.figure(figures["mr_median"]),
                    *(_share(figures[each]) for each in ("prefers_new_rate", "flip_rate", "flip_rate_fresh")),
                    *(_recovery(figures[each]) for each in ("kl_touched", "kl_neutral")),
                    *(words.ratio((figures[each] or {}).get("median")) for each in ("speedup_full", "speedup_suffix")),
                )
    return table


def _recovery(kl: dict[str, Any]) -> str:
    """`0.92 (41+8)`: the median, how many count, and how many are under the floor."""
    return f"{words.figure(kl['median'])} ({kl['num']}+{kl['num_under_floor']})"


def _footnote(body: dict[str, Any], with_quality: bool) -> str:
    model, versions = body["model"], body["versions"]
    lines = ["repair, suffix, full: what the cost model chooses; the other figures are a repair's, chosen or not"]
    if with_quality:
        lines += [
            "MR and KL touched: medians over automatic probes; KL neutral: over edits; behind a KL recovery how many "
            "count + how many the edit hardly moves",
            f"{model['name']} on {model['device']} in {model['dtype']}, {words.count(versions['threads'], 'thread')}; "
            "the baselines are the faster of kvfix's passes and the model's own, each timed once an edit",
        ]
    return "\n".join(lines)


def _table(names: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name == "selector" else "right", no_wrap=True)
    return table


def _share(value: float | None) -> str:
    return words.NONE if value is None else f"{value:.0%}"


def _number(quantiles: dict[str, float] | None, which: str = "median", form: str = ",.0f") -> str:
    return words.figure(None if quantiles is None else quantiles[which], form)
