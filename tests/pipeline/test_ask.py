"""Ask: answers come from the stored rows of the version that is named."""

import pytest

from kvfix.errors import DocumentError, UsageError
from kvfix.pipeline.ask import ask
from kvfix.pipeline.load import load_cache
from tests.pipeline.desk import EDITS, TEXT, equal

QUESTION = "How many days?"


def answers(desk, question=QUESTION, **options):
    return ask(desk.engine, desk.store, desk.head(), question, max_new=12, **options)


def generated(engine, cache, question_ids):
    text = engine.text.decode(engine.generate(cache, [question_ids], 12)[0])
    return text.split("\n\nQuestion:")[0].strip()


def test_one_answer_of_the_current_cache(desk):
    desk.build(TEXT)
    (answer,) = answers(desk)
    assert (answer.source, answer.version, answer.state) == ("current", 1, "exact")
    assert answer.text == generated(desk.engine, desk.loaded(room=100), desk.engine.text.question_ids(QUESTION))
    assert answer.load_ms >= 0
    assert set(answer.to_json()) == {"source", "version", "state", "text", "load_ms", "answer_ms"}


def test_compare_puts_previous_current_and_fresh_side_by_side(desk):
    desk.build(TEXT)
    desk.edit(EDITS["all replaced"].replace("N", "M"), k=2, strategy="repair", verify=False)
    desk.edit(EDITS["all replaced"], k=2, strategy="repair", verify=False)
    previous, current, fresh = answers(desk, compare=True)
    assert [a.source for a in (previous, current, fresh)] == ["previous", "current", "fresh"]
    assert [a.version for a in (previous, current, fresh)] == [2, 3, None]
    assert [a.state for a in (previous, current, fresh)] == ["exact", "repaired", "exact"]
    ids = desk.engine.text.question_ids(QUESTION)
    before = desk.store.snapshot(desk.store.previous(desk.head()))
    assert previous.text == generated(desk.engine, load_cache(desk.engine, before, 100), ids)
    assert current.text == generated(desk.engine, desk.loaded(room=100), ids)
    made = desk.engine.prefill(desk.engine.encode(EDITS["all replaced"]).token_ids, room=100)
    assert fresh.text == generated(desk.engine, made, ids)


def test_fresh_may_be_of_another_text(desk):
    desk.build(TEXT)
    *_, fresh = answers(desk, compare=True, fresh_text="Another text altogether.")
    cache = desk.engine.prefill(desk.engine.encode("Another text altogether.").token_ids, room=100)
    assert fresh.text == generated(desk.engine, cache, desk.engine.text.question_ids(QUESTION))


def test_the_first_version_has_none_before_it(desk):
    desk.build(TEXT)
    assert [answer.source for answer in answers(desk, compare=True)] == ["current", "fresh"]


def test_a_previous_version_of_another_model_is_left_out(desk, zoo):
    from kvfix.engine import Engine
    from kvfix.pipeline.build import build

    other = Engine.open(str(zoo("qwen2")))
    list(build(other, desk.store, [desk.document(TEXT)]))
    desk.build(TEXT, force=True)
    assert [answer.source for answer in answers(desk, compare=True)] == ["current", "fresh"]


def test_a_previous_empty_version_is_left_out(desk):
    desk.build("")
    desk.edit(TEXT)
    assert [answer.source for answer in answers(desk, compare=True)] == ["current", "fresh"]


def test_white_space_in_front_takes_a_question_verbatim(desk):
    desk.build(TEXT)
    (answer,) = answers(desk, "\n\nDays: ")
    assert answer.text == generated(desk.engine, desk.loaded(room=100), desk.engine.text.plain_ids("\n\nDays: "))


@pytest.mark.parametrize("question", ["", "  ", "\n"])
def test_an_empty_question(desk, question):
    desk.build(TEXT)
    with pytest.raises(UsageError, match="question is empty"):
        answers(desk, question)


def test_an_empty_document(desk):
    desk.build("")
    with pytest.raises(UsageError, match=r"a\.md is empty"):
        answers(desk)


def test_a_question_too_long_for_the_context(desk):
    desk.build(TEXT)
    with pytest.raises(DocumentError, match="exceed the 512"):
        answers(desk, "why? " * 100)


def test_asking_changes_nothing(desk):
    desk.build(TEXT)
    before, record = desk.loaded(), desk.head()
    answers(desk, compare=True)
    assert desk.head() == record
    assert equal(desk.loaded(), before)


def test_a_moved_document_answers_from_turned_keys(desk):
    """The answer of a cache whose rows all moved and were all recomputed is the fresh one's."""
    desk.build(TEXT)
    desk.edit(EDITS["before the first token"], strategy="suffix", verify=False)
    _, current, fresh = answers(desk, compare=True)
    assert current.text == fresh.text
