"""What doctor found, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kvfix.cli import words
from kvfix.cli.layout import facts_grid, indented

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvfix.cli.doctor import Finding

MEANING = {
    "prefill": "prefill, against the model's own forward",
    "recompute_all": "every row recomputed, against a fresh prefill",
    "recompute_suffix": "every row from the edit on, against a fresh prefill",
    "recompute_window": "a short window, against the model's own forward",
    "recompute_scattered": "scattered rows, against dense attention",
    "alignment": "spans that change the length, realigned",
    "packed": "several texts in one pass, against single passes",
}


def doctor_lines(around: dict[str, Any], store: Finding, model: Finding | None) -> Iterator[RenderableType]:
    """Three sections, one below the other."""
    yield from _section("environment", _environment(around))
    yield from _section("store", _store(store.facts))
    if model is None:
        yield from _section("model", [("name", "none given, and the demo model is not on this machine")])
        return
    yield from _section("model", _model(model.facts))
    if model.facts["gate"]:
        yield _figures(model.facts["gate"])
        yield ""


def _section(title: str, facts: Any) -> Iterator[RenderableType]:
    yield Text(title, "bold")
    yield facts_grid(facts)
    yield ""


def _environment(around: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "kvfix", f"{around['kvfix']}, Python {around['python']} on {around['platform']}"
    yield "libraries", f"torch {around['torch']}, transformers {around['transformers']}"
    yield "devices", ", ".join(around["devices"])
    yield "processor", f"{words.count(around['num_cpus'], 'core')}, {words.count(around['num_threads'], 'thread')}"
    yield "memory", f"{words.size(around['memory_bytes'])}, {words.size(around['available_bytes'])} free"
    yield "cache", around["cache_folder"]
    yield "demo model", around["demo_model"] or "not fetched"


def _store(facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "path", words.visible(facts["path"]) + ("" if facts["exists"] else " (not there yet)")
    access = [name for name in ("readable", "writable") if facts[name]]
    yield "access", Text(", ".join(access) or "none", "" if len(access) == 2 else "yellow")
    yield "free", words.size(facts["free_bytes"])
    yield "file system", f"{facts['file_system'] or 'unknown'}{', over a network' if facts['network'] else ''}"
    yield "locks", _locks(facts["locks"])
    for line in facts["notes"]:
        yield "note", Text(words.visible(line), "yellow")
    if "num_documents" not in facts:
        return
    yield (
        "documents",
        f"{facts['num_documents']:,} in {words.count(facts['num_corpora'], 'corpus', 'corpora')}: "
        f"{facts['num_tokens']:,} tokens, {words.size(facts['stored_bytes'])}",
    )
    yield "debt", words.count(facts["stale_rows"], "stale row") if facts["stale_rows"] else "none"
    for built in facts["models"]:
        yield "built by", f"{built['name'] or 'an unknown model'} {built['dtype'] or ''} ({built['fingerprint']})"


def _locks(found: dict[str, bool] | None) -> Text:
    if found is None:
        return Text("not tried", "dim")
    held = all(found.values())
    return Text("another process was kept out" if held else "another process was NOT kept out", "" if held else "red")


def _model(facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "name", words.visible(facts["name"] or "the demo model")
    if "fingerprint" in facts:
        yield "loaded as", f"{facts['dtype']} on {facts['device']} ({facts['fingerprint']})"
        yield "longest text", words.count(facts["max_tokens"], "token") if facts["max_tokens"] else "no limit known"
    gate = facts["gate"]
    if not gate:
        yield "gate", Text("refused" if facts["supported"] is False else "not run", "red")
        return
    yield "gate", Text("passed", "green").append(", kept from an earlier run" if facts["kept"] else "", "default")
    yield "layers", f"{gate['shape']['layers']}, {gate['shape']['heads']} kv heads of {gate['shape']['key_dim']}"
    yield "rotation", _rotation(gate["rotation"])
    yield "noise", f"{gate['noise']['rows']:.1e} in rows, {gate['noise']['nats']:.1e} nats in answers"


def _rotation(finding: dict[str, Any]) -> str:
    """How the keys of all layers turn with position, in one line."""
    if not finding["movable"]:
        return str(finding["reason"])
    kinds = [
        "no positions"
        if not one["inv_freq"]
        else f"{'interleaved' if one['interleaved'] else 'half-split'}, {2 * len(one['inv_freq'])} dims"
        for one in finding["sets"]
    ]
    counts = [sum(index == n for index in finding["layers"]) for n in range(len(kinds))]
    layers = "; ".join(f"{words.count(num, 'layer')} {kind}" for num, kind in zip(counts, kinds, strict=True))
    return f"{layers} (key error {finding['key_error']:.1e}, allowed {finding['tolerance']:.0e})"


def _figures(gate: dict[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("what is compared")
    table.add_column("deviation", justify="right", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    figures, allowed = gate["figures"], gate["tolerance"]
    for name in sorted(figures, key=[*MEANING, *figures].index):
        deviation = Text(f"{figures[name]:.1e}", "green" if figures[name] <= allowed else "red")
        table.add_row(MEANING.get(name, name), deviation, f"{allowed:.0e}")
    return indented(table)
