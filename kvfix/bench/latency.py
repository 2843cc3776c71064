"""Latency of a repair against full and suffix re-prefill, and end to end through a real store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfix import debt
from kvfix.core import Document, Notify, RowMap
from kvfix.corpus import document_of
from kvfix.errors import KVFixError, UsageError
from kvfix.pipeline.admission import admit
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.edit import edit
from kvfix.pipeline.measure import ROUNDS, Arms, compare_arms, ratio_spread, spread
from kvfix.pipeline.plan import EditOptions
from kvfix.selectors import Budget, SelectionContext, get_selector, make_plan

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import VersionRecord

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def run_latency(
    engine: Engine,
    contexts: list[int],
    ks: list[int],
    spans: list[int],
    edit_at: float = 1 / 3,
    rounds: int = ROUNDS,
    notify: Notify = lambda line: None,
) -> dict[str, Any]:
    """The `kvfix.latency/1` document: one row a context length, span length and k.

    The text is made of seeded words; the edit replaces `span` tokens at the fraction `edit_at`. No time is reported
    unless recomputing everything from the edit on equals a fresh prefill. Raises `UsageError` for contexts that the
    model cannot take.
    """
    rows = []
    for context, span, k in product(contexts, spans, ks):
        engine.require_fit(context)
        if not 0 <= edit_at < 1 or span < 1 or k < 0 or int(edit_at * context) + span > context:
            raise UsageError(f"no room for a span of {span} at {edit_at:g} of {context} tokens, or bad k {k}")
        notify(f"{context} tokens, k {k}, span {span}")
        rows.append(_row(engine, context, k, span, int(edit_at * context), rounds))
    return {
        "schema": "kvfix.latency/1",
        "model": engine.describe(),
        "rows": rows,
        "device": str(engine.device),
        "dtype": engine.dtype_name,
        "versions": versions(),
    }


def versions() -> dict[str, Any]:
    """What the times were taken with."""
    import platform
    from importlib.metadata import version

    import torch

    return {
        "kvfix": version("kvfix"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }


def _row(engine: Engine, context: int, k: int, span: int, at: int, rounds: int) -> dict[str, Any]:
    old, new = texts_of(engine, context, span, at)
    old_ids, new_ids = engine.encode(old).token_ids, engine.encode(new).token_ids
    diff, arms = _arms(engine, old_ids, new_ids, new, k)
    error = exactness(engine, arms, old_ids)
    if not error <= TOLERANCE[engine.dtype_name]:
        raise KVFixError(f"recomputing every row differs from a fresh prefill by {error:.2e}; no times are reported")
    row: dict[str, Any] = {
        "context": len(new_ids),
        "k": k,
        "span": diff.num_span,
        "edit_at": diff.first,
        "recomputed": len(arms.plan.positions),
        "token_ratio": len(new_ids) / len(arms.plan.positions),
        "max_abs_error_exact": error,
        **compare_arms(arms, rounds),
    }
    del arms
    return {**row, **_end_to_end(engine, old, new, k, rounds)}


def texts_of(engine: Engine, context: int, span: int, at: int) -> tuple[str, str]:
    """Two texts of exactly `context` tokens (prefix included) that differ in `span` tokens at token `at`.

    Words that are single tokens of the model, drawn with a seed.
    """
    words = np.array(list(_single_tokens(engine)))
    rng = np.random.default_rng(context)
    prefix = len(engine.text.prefix)
    chosen = rng.choice(words, context - prefix)
    changed = chosen.copy()
    place = max(0, at - prefix)
    for index in range(place, place + span):
        changed[index] = rng.choice(words[words != chosen[index]])
    old, new = "".join(chosen), "".join(changed)
    for text in (old, new):
        found = len(engine.encode(text).token_ids)
        if found != context:
            raise UsageError(f"the tokenizer makes {found} tokens of {context} words; bench latency cannot use it")
    return old, new


def _single_tokens(engine: Engine, most: int = 400) -> Iterator[str]:
    """Short lower-case words that stand for one token each after a space, in the vocabulary's order."""
    found = 0
    for token in sorted(engine.text.tokenizer.get_vocab(), key=lambda t: (len(t), t)):
        word = " " + token.lstrip("Ġ▁ ")
        if token[:1] in "Ġ▁" and word[1:].isascii() and word[1:].isalpha() and word[1:].islower():
            if len(engine.text.plain_ids(word * 2)) == 2:
                found += 1
                yield word
            if found == most:
                return


def _arms(engine: Engine, old_ids: np.ndarray, new_ids: np.ndarray, text: str, k: int) -> Any:
    from kvfix.diff import diff_tokens

    diff = diff_tokens(old_ids, new_ids)
    encoding = engine.encode(text)
    context = SelectionContext(diff, Budget(k), text, encoding.offsets, encoding.num_prefix)
    plan = make_plan(get_selector("editlocal"), context)
    stale = engine.prefill(old_ids)
    rows = RowMap.of_base(np.arange(len(old_ids))).realigned(plan.source())
    return diff, Arms(engine, rows, [stale], new_ids, plan)


def exactness(engine: Engine, arms: Arms, old_ids: np.ndarray) -> float:
    """Largest |error| of recomputing all rows from the edit on against a fresh prefill."""
    fresh = engine.prefill(arms.token_ids)
    cache = engine.new_cache(arms.token_ids)
    cache.keys.copy_(arms.segments[0].keys)
    cache.values.copy_(arms.segments[0].values)
    engine.recompute(cache, np.arange(arms.first, len(arms.token_ids)))
    worst = [
        float((mine - theirs).abs().max()) for mine, theirs in ((cache.keys, fresh.keys), (cache.values, fresh.values))
    ]
    return max(worst)


def _end_to_end(engine: Engine, old: str, new: str, k: int, rounds: int) -> dict[str, Any]:
    """Load, diff, align, select, recompute and durable write, against a prefill with the durable write of it all."""
    repairs, wholes = [], []
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as folder:
        from kvfix.store import Store

        with Store.open(Path(folder) / "store", create=True) as store:
            admit(engine, store)
            texts = [old, new]
            for number in range(rounds + 1):
                before, after = (document_of(folder, "bench.txt", texts[(number + n) % 2]) for n in range(2))
                head, ms = _store_whole(engine, store, before)
                wholes.append(ms)
                options = EditOptions(k=k, strategy="repair", verify=False, auto_probes=False)
                report = edit(engine, store, head, after, options)
                repairs.append(report.timing_ms()["total"] or 0.0)
    steps = report.timing_ms()
    return {
        "end_to_end_ms": spread(repairs[1:]),
        "full_end_to_end_ms": spread(wholes[1:]),
        "speedup_end_to_end": ratio_spread(wholes[1:], repairs[1:]),
        "last_steps_ms": {name: steps[name] for name in ("load", "diff", "align", "select", "recompute", "persist")},
    }


def _store_whole(engine: Engine, store: Any, document: Document) -> tuple[VersionRecord, float]:
    """Prefill a document and write all of its cache durably; the milliseconds of both."""
    clock = Clock()
    head = store.head(document.corpus, document.doc_id)
    with clock("whole"):
        cache = engine.prefill(engine.encode(document.text).token_ids)
        record = store.commit_base(document, engine.key, cache, debt.fresh(len(cache)), {}, head)
    return record, clock.ms["whole"]
