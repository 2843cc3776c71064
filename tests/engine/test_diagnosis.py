"""Diagnosis against rows that are really transplanted, one at a time, into copies of the cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfix.core import KVCache, TokenDiff
from kvfix.diff import diff_tokens
from kvfix.engine import Continuation, Engine, TransplantDiagnosis, Trial, carrier_positions
from kvfix.errors import DocumentError
from tests.engine.stale import ids_of, stale_of
from tests.tolerances import NATS

QUERY, NEW, OLD = (ids_of(num, num).tolist() for num in (6, 3, 2))
TRIALS = {
    "both answers": Trial(QUERY, NEW, OLD),
    "an insertion": Trial(QUERY, NEW, []),
    "a deletion": Trial(QUERY, [], OLD),
    "one token each": Trial(QUERY[:1], NEW[:1], OLD[:1]),
}


def repaired(engine: Engine, edit: str) -> tuple[TokenDiff, KVCache, KVCache]:
    """The diff, the cache after the spans alone were recomputed, and the fresh one."""
    stale = stale_of(engine, edit)
    engine.recompute(stale.cache, np.flatnonzero(stale.diff.source < 0))
    return stale.diff, stale.cache, engine.prefill(stale.cache.token_ids)


def margin_of(engine: Engine, cache: KVCache, trial: Trial) -> float:
    tried = [Continuation(list(trial.query_ids), list(answer)) for answer in (trial.new_ids, trial.old_ids)]
    means = []
    for continuation in tried:
        found = list(engine.answer_logprobs(cache, [continuation] if continuation.answer_ids else []))
        means += [float(f.gather(1, torch.tensor(continuation.answer_ids)[:, None]).mean()) for f in found] or [0.0]
    return means[0] - means[1]


def effects_by_hand(engine, stale: KVCache, fresh: KVCache, trial: Trial, positions: np.ndarray) -> list[float]:
    base, found = margin_of(engine, stale, trial), []
    for row in positions:
        copy = replace(stale, keys=stale.keys.clone(), values=stale.values.clone())
        copy.keys[:, :, row], copy.values[:, :, row] = fresh.keys[:, :, row], fresh.values[:, :, row]
        found.append(margin_of(engine, copy, trial) - base)
    return found


@pytest.mark.parametrize("case", TRIALS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt-oss"])
def test_effects_are_those_of_real_transplants(gated, name, case):
    engine = gated(name)
    diff, stale, fresh = repaired(engine, "growing")
    positions = np.flatnonzero(diff.source >= 0)[diff.first :: 3]
    found = TransplantDiagnosis(engine, stale, fresh, TRIALS[case]).transplant_effects(positions)
    expected = effects_by_hand(engine, stale, fresh, TRIALS[case], positions)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= NATS
    assert np.abs(found).max() > 10 * NATS


@pytest.mark.parametrize("rows", [1, 25, 40, 10_000])
def test_however_many_candidates_share_a_pass(gated, monkeypatch, rows):
    engine = gated("llama")
    diff, stale, fresh = repaired(engine, "several spans")
    positions = np.flatnonzero(diff.source >= 0)[diff.first :]
    expected = TransplantDiagnosis(engine, stale, fresh, TRIALS["both answers"]).transplant_effects(positions)
    monkeypatch.setattr("kvfix.engine.diagnosis.PASS_ROWS", rows)
    found = TransplantDiagnosis(engine, stale, fresh, TRIALS["both answers"]).transplant_effects(positions)
    assert np.abs(found - expected).max() <= NATS


def test_rows_that_are_fresh_already_have_no_effect(gated):
    engine = gated("llama")
    diff, stale, fresh = repaired(engine, "same length")
    effects = TransplantDiagnosis(engine, stale, fresh, TRIALS["both answers"]).transplant_effects(np.arange(33))
    assert np.abs(effects).max() <= NATS
    assert diff.first == 30


def test_no_candidates(gated):
    engine = gated("llama")
    _, stale, fresh = repaired(engine, "the last token")
    diagnosis = TransplantDiagnosis(engine, stale, fresh, TRIALS["both answers"])
    assert diagnosis.transplant_effects(np.empty(0, np.int64)).shape == (0,)


def test_both_caches_stay_bit_for_bit(gated):
    engine = gated("llama")
    _, stale, fresh = repaired(engine, "growing")
    before = [tensor.clone() for cache in (stale, fresh) for tensor in (cache.keys, cache.values)]
    TransplantDiagnosis(engine, stale, fresh, TRIALS["both answers"]).transplant_effects(np.arange(40, 60))
    after = [tensor for cache in (stale, fresh) for tensor in (cache.keys, cache.values)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_trial_that_does_not_fit(gated):
    engine = gated("llama")
    _, stale, fresh = repaired(engine, "growing")
    with pytest.raises(DocumentError, match="exceed the 512"):
        TransplantDiagnosis(engine, stale, fresh, Trial([5] * 416, [6, 7], [])).transplant_effects(np.arange(5))


# ---- carriers

TEXT = "Fee 30. Old 30, new 300; fee is\t30 and\n30.\n\n30"


def carriers_in(old: str, new: str, answer: str) -> list[int]:
    """Characters at which carriers begin, for texts of one character a token behind a prefix of 2."""
    ids = [np.array([1, 2, *map(ord, text)]) for text in (old, new)]
    offsets = np.stack([np.arange(len(new)), np.arange(1, len(new) + 1)], 1)
    return [row - 2 for row in carrier_positions(new, offsets, 2, diff_tokens(*ids), answer)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("30", [4, 12, 32, 39, 44]),
        (" 30", [4, 12, 32, 39, 44]),
        ("300", [20]),
        ("and", [35]),
        ("gone", []),
        ("", []),
        (" ", []),
    ],
)
def test_carriers(answer, expected):
    assert carriers_in("x" + TEXT[1:], TEXT, answer) == expected


def test_no_carrier_lies_in_a_span_or_before_the_edit():
    assert carriers_in("30 a b 12 c d e f g h i j k l 30", "30 a b 30 c d e f g h i j k l 30", "30") == [30]


def test_the_token_that_holds_the_answers_first_character():
    offsets = np.array([[0, 1], [1, 2], [2, 5], [5, 7]])  # "a", "b", " c3" and "0d"
    diff = diff_tokens(np.array([9, 5, 6, 7]), np.array([1, 5, 6, 7]))
    assert carrier_positions("ab c30d", offsets, 0, diff, "c30d") == [2]
