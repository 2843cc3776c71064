"""Frequencies that depend on a text's length: dynamic NTK is refused beyond its maximum, LongRoPE computed at once."""

import numpy as np
import pytest

from kvfix.engine import engine as engine_module
from kvfix.engine.gate import deviation
from kvfix.engine.rope import PositionFacts, position_facts
from kvfix.errors import DocumentError
from tests.tolerances import CACHE

LIMIT = 256  # the zoo's LongRoPE model


def ids_of(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(num_tokens).integers(5, 300, num_tokens)


def own(engine, ids):
    """The model's own forward."""
    cache = engine.new_cache(ids)
    with engine.plain_attention():
        layers = engine.plain_forward(ids).layers
    for index, layer in enumerate(layers):
        for mine, theirs in zip(cache.layer(index), (layer.keys[0], layer.values[0]), strict=True):
            mine.copy_(theirs)
    return cache


@pytest.fixture
def engine(gated):
    return gated("llama-longrope")


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1, 400])
def test_longrope_equals_the_models_own_forward_on_both_sides_of_the_limit(engine, size):
    assert deviation(engine.prefill(ids_of(size)), own(engine, ids_of(size))) <= CACHE


def test_longrope_keeps_no_state_between_texts(engine):
    short = engine.prefill(ids_of(50))
    long = engine.prefill(ids_of(400))
    assert deviation(engine.prefill(ids_of(50)), short) == 0.0
    assert deviation(engine.prefill(ids_of(400)), long) == 0.0


def test_the_limit_matters(engine):
    """Otherwise these tests show nothing: the same tokens in a longer text have other keys."""
    ids = ids_of(400)
    short, long = engine.prefill(ids[:LIMIT]), engine.prefill(ids)
    assert (short.layer(0)[0] - long.layer(0)[0][:, :LIMIT]).abs().max() > 0.1


def test_longrope_beyond_the_limit_is_never_chunked(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "CHUNK_ROWS", 50)
    seen = []
    cache = engine.prefill(ids_of(400), progress=seen.append)
    assert seen == [400]
    assert deviation(cache, own(engine, ids_of(400))) <= CACHE
    seen.clear()
    engine.prefill(ids_of(LIMIT), progress=seen.append)
    assert sum(seen) == LIMIT
    assert max(seen) == 50


def test_longrope_texts_of_both_kinds_may_be_given_together(engine):
    texts = [ids_of(40), ids_of(300), ids_of(200)]
    for text, cache in zip(texts, engine.prefill_many(texts), strict=True):
        assert deviation(cache, engine.prefill(text)) <= CACHE


def test_longrope_jobs_of_both_kinds_may_be_given_together(engine):
    short, long = engine.prefill(ids_of(100)), engine.prefill(ids_of(300))
    before = short.keys.clone(), long.keys.clone()
    engine.recompute_many([(short, np.arange(90, 100)), (long, np.arange(300))])
    assert (short.keys - before[0]).abs().max() <= CACHE
    assert (long.keys - before[1]).abs().max() <= CACHE


def test_dynamic_ntk_is_refused_beyond_its_maximum(gated):
    engine = gated("llama-dynamic")
    assert deviation(engine.prefill(ids_of(512)), own(engine, ids_of(512))) <= CACHE
    for work in (lambda: engine.encode("x" * 513), lambda: engine.prefill(ids_of(513))):
        with pytest.raises(DocumentError, match=r"513 tokens.*at most 512"):
            work()
    cache = engine.prefill(ids_of(500), room=30)
    with pytest.raises(DocumentError, match="500 tokens of document and 13 of question"):
        list(engine.answer_logprobs(cache, [engine_module.Continuation([7] * 10, [8] * 3)]))


class TestFacts:
    """What a config says of positions."""

    def facts(self, **config) -> PositionFacts:
        from types import SimpleNamespace

        return position_facts(SimpleNamespace(**config))

    def test_plain(self):
        facts = self.facts(max_position_embeddings=100, rope_parameters={"rope_type": "default"})
        assert (facts.max_tokens, facts.length_limit) == (100, None)
        assert not facts.crosses(10, 1000)

    def test_none_at_all(self):
        assert self.facts() == PositionFacts(None, None, ())

    def test_dynamic_takes_the_smaller_maximum(self):
        rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}
        assert self.facts(max_position_embeddings=256, rope_parameters=rope).max_tokens == 64

    @pytest.mark.parametrize("where", ["inside", "beside", "old name"])
    def test_longrope(self, where):
        rope = {"rope_type": "longrope"}
        config = {"max_position_embeddings": 512}
        if where == "inside":
            rope["original_max_position_embeddings"] = 64
        else:
            config["original_max_position_embeddings"] = 64
        config["rope_scaling" if where == "old name" else "rope_parameters"] = rope
        facts = self.facts(**config)
        assert (facts.max_tokens, facts.length_limit) == (512, 64)
        crossings = {(64, 64): False, (64, 65): True, (65, 64): True, (65, 66): True, (10, 20): False}
        assert {pair: facts.crosses(*pair) for pair in crossings} == crossings

    def test_kinds_per_layer_type(self):
        rope = {
            "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default"},
        }
        facts = self.facts(max_position_embeddings=128, rope_parameters=rope)
        assert facts.rope_types == ("default", "longrope")
        assert facts.length_limit == 32


def test_position_limits_of_the_zoo(gated):
    assert gated("llama-longrope").positions.length_limit == LIMIT
    assert gated("llama").positions.length_limit is None
    assert gated("llama-yarn").positions.max_tokens == 512


class TestTextBehindADocument:
    """Keys below the limit are void once the text grows past it: no answer is read off them."""

    def room(self, engine, num_tokens):
        return engine.prefill(ids_of(num_tokens), room=100)

    def test_up_to_the_limit(self, engine):
        assert engine.generate(self.room(engine, LIMIT - 20), [[7] * 4], max_new=16)

    def test_not_across_it(self, engine):
        cache = self.room(engine, LIMIT - 20)
        with pytest.raises(DocumentError, match=r"exceed the 256 that .* takes before its frequencies change"):
            engine.generate(cache, [[7] * 5], max_new=16)
        with pytest.raises(DocumentError, match="256"):
            list(engine.answer_logprobs(cache, [engine_module.Continuation([7] * 5, [8] * 16)]))

    def test_beyond_it_as_far_as_the_context_goes(self, engine):
        assert engine.generate(self.room(engine, LIMIT + 1), [[7] * 5], max_new=16)
        with pytest.raises(DocumentError, match=r"exceed the 512 that [^ ]* takes$"):
            engine.generate(self.room(engine, 500), [[7] * 5], max_new=8)

    @pytest.mark.parametrize(("size", "limit"), [(256, 256), (257, 512), (1, 256)])
    def test_the_limit_in_force(self, engine, size, limit):
        assert engine.positions.limit_behind(size) == limit
        assert PositionFacts(None, 256, ()).limit_behind(size) == (256 if limit == 256 else None)
        assert PositionFacts(300, None, ()).limit_behind(size) == 300
        assert PositionFacts(100, 256, ()).limit_behind(20) == 100
