"""How far apart rows may lie before a benchmark refuses to give times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfix.bench.texts import TOLERANCE, allowed_error
from tests.engine.stale import ids_of


@pytest.fixture
def loud(gated, monkeypatch):
    """A model in half precision whose products of fewer rows are rounded otherwise, as a GPU's are."""
    engine = gated("llama", "bfloat16")
    product = torch.nn.functional.linear

    def linear(rows, weight, bias=None):
        out = product(rows, weight, bias)
        return out if rows.shape[-2] > 30 else out * (1 + torch.finfo(out.dtype).eps)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    # a small model's entries are small
    monkeypatch.setitem(TOLERANCE, "bfloat16", 1e-3)
    return engine


def test_half_precision_is_judged_by_the_models_own_rounding(loud):
    ids = ids_of(50)
    allowed = allowed_error(loud, ids, 25)
    assert allowed > TOLERANCE["bfloat16"]
    fresh, cut = loud.prefill(ids), loud.prefill(ids)
    loud.recompute(cut, np.arange(25))
    loud.recompute(cut, np.arange(25, 50))
    worst = max((fresh.keys - cut.keys).abs().max(), (fresh.values - cut.values).abs().max())
    # what it is judged by is of the size of what is judged, and a wrong row is not let through
    assert TOLERANCE["bfloat16"] < worst <= allowed < fresh.keys.abs().max() / 2


def test_what_has_no_part_before_it_is_judged_by_the_dtype_alone(loud):
    assert allowed_error(loud, ids_of(50), 0) == TOLERANCE["bfloat16"]


def test_fp32_is_never_judged_by_noise(gated):
    assert allowed_error(gated("llama"), ids_of(50), 25) == TOLERANCE["float32"]
