"""The selector study: every item repaired in every way, a record for each, to be broken off and gone on with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix import metrics
from kvfix.bench.case import Case, Choice, Repaired, Selected
from kvfix.bench.items import Item
from kvfix.bench.records import DIAGNOSTIC, SCHEMA, STALE, TRANSPLANT, Record, Records
from kvfix.bench.texts import versions
from kvfix.errors import DocumentError, UsageError
from kvfix.selectors import SELECTORS, get_selector
from kvfix.store.jsonfile import plain

if TYPE_CHECKING:
    from kvfix.core import KVCache
    from kvfix.engine import Engine

DEPLOYABLE = tuple(name for name in SELECTORS if name not in DIAGNOSTIC)


@dataclass(frozen=True)
class Study:
    """Which repairs to try. The cost model is off: every selector gets its rows."""

    selectors: tuple[str, ...] = DEPLOYABLE
    ks: tuple[int, ...] = (32,)
    num_seeds: int = 5  # of selectors that draw
    num_transplanted: int = 0  # kept items whose sets are also copied from the fresh cache

    def __post_init__(self) -> None:
        for name in self.selectors:
            get_selector(name)

    def choices(self) -> list[Choice]:
        """Every selector with every k, and with every seed where it has one."""
        return [
            Choice(name, k, seed)
            for name in self.selectors
            for k in self.ks
            for seed in range(self.num_seeds if _draws(name) else 1)
        ]

    def transplants(self) -> list[Choice]:
        """The same sets, copied."""
        return [choice._replace(selector=TRANSPLANT + choice.selector) for choice in self.choices()]


class Progress(NamedTuple):
    """An item is done."""

    records: list[Record]  # its new ones; none where all was known
    num_done: int
    num_items: int


def _draws(name: str) -> bool:
    return any(field.name == "seed" for field in fields(get_selector(name)))  # type: ignore[arg-type]


def run_study(engine: Engine, items: Sequence[Item], study: Study, records: Records) -> Iterator[Progress]:
    """Run what `records` does not know yet, an item at a time; its records are on disk when it is yielded.

    Raises `UsageError` where a known record is of another text under the same id.
    """
    model, facts = engine.describe(), versions()
    before, num_kept, prepared = None, 0, False
    for number, item in enumerate(items, 1):
        wanted = study.choices() + (study.transplants() if num_kept < study.num_transplanted else [])
        own = _known(records, item, Choice(STALE, 0), model)
        missing = [choice for choice in wanted if _known(records, item, choice, model) is None]
        made: list[Record] = []
        if own is None or missing:
            if not prepared:
                prepared = _prepare(engine, item)
            found, before = _item_records(engine, item, missing, before)
            made = [plain({"schema": SCHEMA, **record, "model": model}) for record in found]
            made[0]["versions"] = facts
        num_kept += (own or made[0])["kept"]
        new = made if own is None else made[1:]
        records.add(new)
        yield Progress(new, number, len(items))


def _prepare(engine: Engine, item: Item) -> bool:
    """The gate, for rotations and noise, and a prefill to warm up; True when it is done."""
    from kvfix.engine import run_gate

    if engine.gate_report is None:
        engine.gate_report = run_gate(engine)
    # an item that the model cannot take is named later
    with suppress(DocumentError):
        engine.prefill(engine.encode(item.after).token_ids)
    return True


def _known(records: Records, item: Item, choice: Choice, model: dict[str, str]) -> Record | None:
    record = records.find(item.id, *choice, model["fingerprint"])
    if record is not None and record["digest"] != item.digest:
        raise UsageError(f"{records.path}: holds records of another text under the id {item.id!r}; give another --out")
    return record


def _item_records(
    engine: Engine, item: Item, choices: Sequence[Choice], before: KVCache | None
) -> tuple[list[Record], KVCache | None]:
    """The item's own record and one a choice; and its old text's cache."""
    try:
        case = Case(engine, item, before)
    except DocumentError as error:
        common = _common(item, None, f"unusable: {error.message}")
        own = {**common, **_empty(Choice(STALE, 0)), **dict.fromkeys(STALENESS)}
        return [own, *({**common, **_empty(choice)} for choice in choices)], before
    reason = case.dropped_reason
    common = _common(item, case, reason)
    own = {**common, **_empty(Choice(STALE, 0)), **_staleness(case)}
    if reason is not None:
        return [own, *({**common, **_empty(choice)} for choice in choices)], case.stale
    judged = [
        {**common, **_empty(one.choice), **_judged(case, one, repaired)} for one, repaired in case.outcomes(choices)
    ]
    return [own, *judged], case.stale


def _common(item: Item, case: Case | None, reason: str | None) -> Record:
    """What all records of an item say."""
    about = asdict(item)
    record = {name: about[name] for name in ("id", "condition", "distance", "family", "split")}
    record |= {"digest": item.digest, "kept": reason is None, "dropped_reason": reason}
    record |= dict.fromkeys(
        ("num_tokens", "num_spans", "span_rows", "margin_stale", "margin_fresh", "flip_fresh", "full_prefill_ms")
    )
    if case is not None:
        record |= {
            "num_tokens": len(case.new_ids),
            "num_spans": len(case.diff.spans),
            "span_rows": case.diff.num_span,
            "margin_stale": case.of_stale.margin,
            "margin_fresh": case.of_fresh.margin,
            "flip_fresh": metrics.flip(case.of_fresh.continuation, item.new, item.old),
            "full_prefill_ms": case.full_prefill_ms,
        }
    return record


def _empty(choice: Choice) -> Record:
    """A choice of which nothing was measured."""
    figures = ("rows", "mr", "flip", "prefers_new", "kl_recovery", "margin_repaired", "recompute_ms", "select_ms")
    return {**choice._asdict(), **dict.fromkeys((*figures, "upstream_unchanged"))}


# what an item's own record says besides; None for an item that the model cannot take
STALENESS = ("prefers_old", "severity", "kl_stale", "tokens_changed", "drift", "upstream_error")


def _staleness(case: Case) -> dict[str, Any]:
    """How wrong the stale cache is, and what could have told so beforehand."""
    stale, fresh, item = case.of_stale, case.of_fresh, case.item
    known = stale.logprobs is not None and fresh.logprobs is not None
    return {
        "flip": metrics.flip(stale.continuation, item.new, item.old),
        "prefers_old": stale.margin <= 0,
        "severity": fresh.margin - stale.margin,
        "kl_stale": metrics.kl_mean(fresh.logprobs, stale.logprobs) if known else None,  # type: ignore[arg-type]
        "tokens_changed": case.diff.num_changed,
        "drift": case.drift,  # how far the rows behind the edit are from fresh ones at the second layer
        "upstream_error": case.upstream_error,
    }


def _judged(case: Case, one: Selected, repaired: Repaired | None) -> dict[str, Any]:
    """What one choice recovers."""
    if repaired is None:
        return {"kept": False, "dropped_reason": f"selector: {one.fault}"}
    margin, item = repaired.margin, case.item
    return {
        "rows": len(one.positions) - case.diff.num_span,
        "mr": metrics.margin_recovery(case.of_stale.margin, margin, case.of_fresh.margin, case.engine.noise_nats),
        "flip": metrics.flip(repaired.continuation, item.new, item.old),
        "prefers_new": margin > 0,
        "kl_recovery": repaired.kl_recovery,
        "margin_repaired": margin,
        "recompute_ms": repaired.recompute_ms,
        "select_ms": one.select_ms,
        "upstream_unchanged": repaired.upstream_unchanged,
    }
