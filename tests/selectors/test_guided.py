"""Asked and kindred: windows at the places that a question, or the edited rows, lead to, behind edited words."""

from dataclasses import replace

import numpy as np
import pytest

from kvfix.diff import diff_tokens
from kvfix.errors import UsageError
from kvfix.selectors import Budget, SelectionContext, get_selector
from tests.selectors.contexts import Signals

QUERY = (5, 6)
HEAD = "The tower is kept by Anna . "
ASIDE = "Wool is dry . Corn is high . Rain falls soon . Hens sleep now . Oats grow tall . "
WOMEN = "Where she keeps watch the lamp burns red . "
MEN = "Where he keeps watch the lamp burns blue . "


def context_of(before: str, after: str, contrast: dict[str, float], k: int = 16, query=QUERY) -> SelectionContext:
    """A word a token; the contrast of a place is that of its rows."""
    vocabulary: dict[str, int] = {}
    ids, offsets = [], []
    for text in (before, after):
        words = text.split(" ")[:-1]
        ends = np.cumsum([len(word) + 1 for word in words])
        offsets.append(np.stack([ends - [len(word) + 1 for word in words], ends - 1], 1))
        ids.append(np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words]))
    scores = np.zeros(len(ids[1]))
    for place, score in contrast.items():
        first = int(np.searchsorted(offsets[1][:, 0], after.index(place)))
        scores[first : first + place.count(" ")] = score
    diff = diff_tokens(*ids)
    return SelectionContext(diff, Budget(k), after, offsets[1], 0, before, offsets[0], query, Signals(scores))


@pytest.fixture(params=["asked", "kindred"])
def name(request) -> str:
    return request.param


def words_at(context: SelectionContext, rows: np.ndarray) -> str:
    return " ".join(context.text[low:high] for low, high in context.offsets[rows])


def test_places_without_a_shared_word_are_found(name):
    before, after = (f"{HEAD.replace('Anna', name)}{ASIDE}{MEN}{ASIDE}{WOMEN}{ASIDE}" for name in ("Paul", "Anna"))
    context = context_of(before, after, {WOMEN: 2.0, MEN: 1.0}, k=24)
    found = words_at(context, get_selector(name).select(context))
    assert WOMEN.strip() in found
    assert MEN.strip() in found
    assert context.evidence.asked == [QUERY if name == "asked" else 3]


def test_the_place_that_stands_out_most_comes_first(name):
    before, after = (f"{HEAD.replace('Anna', name)}{ASIDE}{MEN}{ASIDE}{WOMEN}{ASIDE}" for name in ("Paul", "Anna"))
    found = words_at(c := context_of(before, after, {WOMEN: 2.0, MEN: 1.0}, k=12), get_selector(name).select(c))
    assert WOMEN.strip() in found
    assert MEN.strip() not in found


def test_an_edited_word_comes_first(name):
    listed = "Anna has the lamp that burns red at night . "
    before, after = (f"{HEAD.replace('Anna', name)}{ASIDE}{MEN}{ASIDE}{listed}{ASIDE}" for name in ("Paul", "Anna"))
    found = words_at(c := context_of(before, after, {MEN: 2.0}, k=13), get_selector(name).select(c))
    assert listed.strip() in found
    assert MEN.strip() not in found


def test_where_nothing_stands_out_it_is_linked(name):
    before, after = (f"{HEAD.replace('Anna', name)}{ASIDE}{WOMEN}{ASIDE}" for name in ("Paul", "Anna"))
    context = context_of(before, after, {})
    assert get_selector(name).select(context).tolist() == get_selector("linked").select(context).tolist()


def test_nothing_behind_the_edit(name):
    context = context_of("The tower is kept by Paul ", "The tower is kept by Anna ", {})
    assert get_selector(name).select(context).tolist() == []


def test_a_window_holds_the_row_that_is_akin():
    """A question looks at a place as a whole, kinship at one of its rows."""
    long = "Of all that burn at night the lamp with the tall flame is the one where she keeps watch . "
    before, after = (f"{HEAD.replace('Anna', name)}{ASIDE}{long}{ASIDE}" for name in ("Paul", "Anna"))
    context = context_of(before, after, {"she ": 2.0}, k=16)
    assert "she keeps watch" in words_at(context, get_selector("kindred").select(context))


def test_kindred_needs_a_model():
    with pytest.raises(UsageError, match="selector kindred looks at the stale rows with the model"):
        get_selector("kindred").select(replace(context_of(HEAD, HEAD.replace("Anna", "Paul"), {}), evidence=None))


@pytest.mark.parametrize("lacking", ["query_ids", "evidence"])
def test_what_asked_needs(lacking):
    context = context_of(HEAD, HEAD.replace("Anna", "Paul"), {})
    values = {"query_ids": (), "evidence": None}
    with pytest.raises(UsageError, match="needs a question" if lacking == "query_ids" else "with the model"):
        get_selector("asked").select(SelectionContext(**{**vars(context), lacking: values[lacking]}))
