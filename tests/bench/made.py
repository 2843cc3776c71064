"""Items that a random model answers as a test needs it to, and records made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

from kvfix.bench.case import Case
from kvfix.bench.items import Item
from kvfix.engine import Engine

HEAD = "The ferry leaves at noon. The captain decides in every case. "
TAIL = "Children pay half of it. Bring the box and the receipt. "
WORDS = ("oats", "rye", "corn", "hops", "beet", "figs", "kale", "leek")
MODEL = {"name": "made", "fingerprint": "0123456789abcdef", "dtype": "float32", "device": "cpu"}


def draft(number: int) -> Item:
    """One of endless items, of the same length before and after; its answers are any two words."""
    old, new = WORDS[number % 8], WORDS[(number // 8 + number + 1) % 8]
    before, after = (f"{HEAD}Cargo {number} is {word}. {TAIL}" for word in (old, new))
    return Item(f"made-{number}", "direct", 0, before, after, f" Cargo {number} is", f" {old}", f" {new}")


def turned(item: Item) -> Item:
    """The same with its answers exchanged."""
    return replace(item, old=item.new, new=item.old)


def kept_items(engine: Engine) -> Iterator[Item]:
    """Items that the model keeps. A random one has no opinion of its own: the answer that it gives is called new."""
    for number in count():
        item = draft(number)
        for tried in (item, turned(item)):
            if Case(engine, tried).dropped_reason is None:
                yield tried
                break


def some(engine: Engine, number: int) -> list[Item]:
    """The first kept items."""
    return list(islice(kept_items(engine), number))


def record(item: str, selector: str, **more: Any) -> dict[str, Any]:
    """A record of a study: a kept item's unless said otherwise."""
    return {
        "id": item,
        "condition": "direct",
        "distance": 0,
        "model": MODEL,
        "selector": selector,
        "k": 8,
        "seed": 0,
        "kept": True,
        "dropped_reason": None,
        "mr": 0.5,
        "flip": True,
        "prefers_new": True,
        "kl_recovery": 0.5,
        "rows": 8,
        "recompute_ms": 2.0,
        "select_ms": 1.0,
        "full_prefill_ms": 30.0,
        "upstream_unchanged": True,
        **more,
    }


def own_record(item: str, **more: Any) -> dict[str, Any]:
    """An item's own record."""
    facts = {
        "margin_stale": -1.0,
        "margin_fresh": 1.0,
        "severity": 2.0,
        "prefers_old": True,
        "flip": False,
        "flip_fresh": True,
        "tokens_changed": 1,
        "drift": 0.1,
        "upstream_error": 1e-6,
        "versions": {"kvfix": "made"},
    }
    unmeasured = dict.fromkeys(("mr", "rows", "recompute_ms", "select_ms", "kl_recovery", "upstream_unchanged"))
    return record(item, "stale", **{"k": 0, **unmeasured, **facts, **more})
