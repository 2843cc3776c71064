"""kvfix ask: an answer from a cached document, or from its previous, current and a fresh cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix.cli import words
from kvfix.cli.options import ENGINE, READING, SERVING, Compare, MaxNew, OfDoc, Question, StaleOk
from kvfix.cli.verb import Run, verb
from kvfix.errors import UsageError

if TYPE_CHECKING:
    from kvfix.api import KVFix
    from kvfix.pipeline.ask import Answer
    from kvfix.store import VersionRecord


@verb(SERVING, ENGINE, READING, example="kvfix ask 'How long do refunds take?' --doc docs/refunds.md")
def ask(
    run: Run,
    question: Question,
    doc: OfDoc,
    compare: Compare = False,
    stale_ok: StaleOk = False,
    max_new: MaxNew = 64,
) -> None:
    """Answer a question from a document's cache.

    The answer goes to standard output, everything else to standard error.
    """
    if not question.strip():
        raise UsageError("the question is empty")
    with run.open(read_only=True) as kv:
        record = kv.record(doc)
        state = _admitted(record, stale_ok)
        with run.out.working("loading the model"):
            answers = _answers(kv, record, question, state, compare, max_new)
        run.out.document(
            {
                "schema": "kvfix.ask/1",
                "doc": record.doc_id,
                "corpus": record.corpus,
                "state": state,
                "question": question,
                "model": kv.engine.describe(),
                "answers": [answer.to_json() for answer in answers],
            }
        )
    _show(run, state, answers)


def _admitted(record: VersionRecord, stale_ok: bool) -> str:
    """The document's state; `UsageError` where the cache no longer is that of its file."""
    from kvfix.pipeline.status import document_status

    state = document_status(record).state
    path = f"{record.corpus}/{record.doc_id}"
    if state == "stale" and not stale_ok:
        raise UsageError(f"{path} has changed since it was cached; run: kvfix edit {path} (or pass --stale-ok)")
    if state == "missing" and not stale_ok:
        raise UsageError(f"{path} is gone; pass --stale-ok to answer from what was cached of it")
    return state


def _answers(kv: KVFix, record: VersionRecord, question: str, state: str, compare: bool, max_new: int) -> list[Answer]:
    """With `compare`, the fresh cache is that of the file as it is now, where there is one."""
    from kvfix.pipeline.ask import ask

    fresh_text = kv.document(record).text if compare and state == "stale" else None
    return ask(kv.engine, kv.store, record, question, compare=compare, fresh_text=fresh_text, max_new=max_new)


def _show(run: Run, state: str, answers: list[Answer]) -> None:
    if state in ("stale", "missing"):
        gone = "has changed since it was cached" if state == "stale" else "is gone"
        run.out.warn(f"the file {gone}; this is the cached text's answer")
    if len(answers) == 1:
        run.out.answer(words.safe(answers[0].text))
        run.out.note(_about(answers[0]))
        return
    for number, answer in enumerate(answers):
        run.out.answer(("\n" if number else "") + f"{answer.source} ({_about(answer)})")
        run.out.answer(words.safe(answer.text))


def _about(answer: Answer) -> str:
    version = f"version {answer.version}, " if answer.version is not None else ""
    times = f"loaded in {words.duration(answer.load_ms)}, answered in {words.duration(answer.answer_ms)}"
    return f"{version}{answer.state}, {times.replace('loaded', 'prefilled') if answer.source == 'fresh' else times}"
