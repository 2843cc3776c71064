"""Ask: answer a question from a cached document, or from its previous, current and fresh cache side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfix.errors import UsageError
from kvfix.pipeline.admission import admit, require_key
from kvfix.pipeline.clock import Clock
from kvfix.pipeline.load import load_cache

if TYPE_CHECKING:
    from kvfix.core import KVCache
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord


@dataclass(frozen=True)
class Answer:
    """One cache's answer; `source` is previous, current or fresh."""

    source: str
    version: int | None
    state: str
    text: str
    load_ms: float  # reading the cache, or prefilling it
    answer_ms: float

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def ask(
    engine: Engine,
    store: Store,
    record: VersionRecord,
    question: str,
    *,
    compare: bool = False,
    fresh_text: str | None = None,
    max_new: int = 64,
) -> list[Answer]:
    """Greedy answers of the current cache and, with `compare`, of the previous and a fresh one.

    The fresh cache is prefilled from `fresh_text` (the document's text as it is now), else from the stored text.
    A question that begins with white space is taken verbatim, any other goes into the template. Raises
    `ModelMismatchError`, `DocumentError` when question and answer do not fit behind the document, `UsageError` for
    an empty document.
    """
    require_key(engine, store, record)
    if record.num_tokens == 0:
        raise UsageError(f"{record.doc_id} is empty; there is nothing to answer from")
    admit(engine, store)
    query = engine.text.query_ids(question)
    answers = []
    previous = store.previous(record) if compare else None
    if previous is not None and previous.num_tokens and previous.model == record.model:
        answers.append(_stored(engine, store, previous, "previous", query, max_new))
    answers.append(_stored(engine, store, record, "current", query, max_new))
    if compare:
        text = store.snapshot(record).text if fresh_text is None else fresh_text
        clock = Clock()
        with clock("load"):
            cache = engine.prefill(engine.encode(text).token_ids, room=len(query) + max_new)
        answers.append(_answer(engine, cache, "fresh", None, "exact", query, max_new, clock))
    return answers


def _stored(engine: Engine, store: Store, record: VersionRecord, source: str, query: list[int], max_new: int) -> Answer:
    clock = Clock()
    with clock("load"):
        cache = load_cache(engine, store.snapshot(record), len(query) + max_new)
    return _answer(engine, cache, source, record.version, record.debt.state, query, max_new, clock)


def _answer(
    engine: Engine,
    cache: KVCache,
    source: str,
    version: int | None,
    state: str,
    query: list[int],
    max_new: int,
    clock: Clock,
) -> Answer:
    with clock("answer"):
        text = engine.text.decode(engine.generate(cache, [query], max_new)[0])
    # a plain template has no end of turn: the model goes on with a question of its own
    text = text.split("\n\nQuestion:")[0] if engine.text.template.name == "plain" else text
    return Answer(source, version, state, text.strip(), clock.ms["load"], clock.ms["answer"])
