"""Passes of whole models by the kernels equal those by PyTorch: documents packed, rows moved, evidence, questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvfix import align
from kvfix.core import KVCache, RowMap
from kvfix.engine import Continuation, Engine, StaleEvidence
from kvfix.ops import backend
from tests.engine.stale import Stale, ids_of, stale_of
from tests.ops.devices import DEVICE, LONG
from tests.tolerances import CACHE, EVIDENCE, NATS

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the models of these tests lie on the CPU")

# softcaps and windows of each layer's own; then attention sinks, and pairs turned interleaved in half of a head
MODELS = ["gemma2", *(["gpt-oss", "glm-interleaved"] if LONG else [])]


@dataclass
class Work:
    """One of everything that calls an op, on caches prefilled by PyTorch."""

    engine: Engine
    stale: Stale
    short: KVCache

    @classmethod
    def of(cls, engine: Engine) -> Work:
        return cls(engine, stale_of(engine, "growing", room=40), engine.prefill(ids_of(23, 1), room=20))

    def do(self) -> tuple[list[KVCache], list[torch.Tensor], list[np.ndarray]]:
        """Caches, log-probabilities, evidence."""
        engine, stale, short = self.engine, self.stale.cache, self.short
        found = StaleEvidence(engine, stale, self.stale.diff, self.stale.stored)
        evidence = [found.deviation(1, "both"), found.kinship(1), found.query_attention(tuple(ids_of(5, 2).tolist()))]
        engine.recompute_many([(stale, np.r_[30:37, 50, 60:64]), (short, np.array([2, 22]))])
        tried = Continuation(ids_of(3, 3).tolist(), ids_of(4, 4).tolist())
        logprobs = list(engine.answer_logprobs_of([(stale, tried), (stale, tried), (short, tried)]))
        rows = RowMap.of_base(np.arange(23)).realigned(np.r_[-1, -1, np.arange(20)])
        moved = align.aligned(rows, [short], ids_of(22, 1), 5, engine.device, engine.rotations)
        return [stale, short, moved], logprobs, evidence


@pytest.mark.parametrize("name", MODELS)
def test_passes_by_kernels_equal_passes_by_pytorch(gated, name, monkeypatch):
    engine, served = gated(name), set()
    expected, again = Work.of(engine).do(), Work.of(engine)
    real = backend._require_triton
    monkeypatch.setattr(backend, "_require_triton", lambda op, tensor: (served.add(op), real(op, tensor)))
    monkeypatch.setenv("KVFIX_OPS", "triton")
    caches, logprobs, evidence = again.do()
    assert served == {"positional_attention", "rotate_keys", "scatter_kv", "kv_deviation"}
    for mine, theirs in zip(caches, expected[0], strict=True):
        end = len(mine)
        for one, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            scale = max(1.0, float(other[:, :, :end].abs().max()))
            assert (one[:, :, :end] - other[:, :, :end]).abs().max() <= CACHE * scale
    for one, other in zip(logprobs, expected[1], strict=True):
        assert (one - other).abs().max() <= NATS
    for one, other in zip(evidence, expected[2], strict=True):
        assert np.abs(one - other).max() <= EVIDENCE * other.max()
