"""A pass without logits ends where its last layer has its keys and values: what comes after them nobody reads."""

import numpy as np
import pytest

from kvfix.core import KVCache
from kvfix.engine.attention import Pass
from kvfix.engine.cache import Rows
from kvfix.engine.gate import deviation

IDS = np.random.default_rng(0).integers(5, 300, 60)


@pytest.fixture
def engine(gated):
    return gated("llama")


def attended(engine, monkeypatch, work):
    """The layers that were asked for attention."""
    from kvfix.engine import engine as engine_module

    passes = []
    monkeypatch.setattr(engine_module, "Pass", lambda groups: passes.append(Pass(groups)) or passes[-1])
    work()
    return [sorted(this.attended) for this in passes]


def test_the_last_layer_attends_to_nothing(engine, monkeypatch):
    layers = list(range(engine.shape.layers))
    assert attended(engine, monkeypatch, lambda: engine.prefill(IDS)) == [layers[:-1]]


def test_its_rows_are_those_of_a_whole_pass(engine):
    whole = engine.new_cache(IDS)
    engine.run_pass(Pass([Rows.at(whole, np.arange(len(IDS)))]))
    assert deviation(engine.prefill(IDS), whole) == 0.0


def test_lower_layers_alone(engine):
    whole = engine.prefill(IDS)
    lower = KVCache(whole.keys[:2].clone().zero_(), whole.values[:2].clone().zero_(), IDS, np.arange(len(IDS)))
    engine.recompute(lower, np.arange(len(IDS)))
    for layer in range(2):
        for mine, theirs in zip(lower.layer(layer), whole.layer(layer), strict=True):
            assert (mine == theirs).all()


def test_logits_come_from_all_of_the_model(engine, monkeypatch):
    cache = engine.new_cache(IDS)
    rows = Rows.at(cache, np.arange(len(IDS)))
    layers = list(range(engine.shape.layers))
    assert attended(engine, monkeypatch, lambda: engine.logits([rows], [3])) == [layers]
