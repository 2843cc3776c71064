"""Kernels launched with a pack of fixed room serve whatever was loaded last, as a pack of its own would be served."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfix.ops import Pack, packed_attention, scatter_kv
from kvfix.ops.fixed_pack import FixedPack, Kind
from kvfix.ops.positional_attention.naive import packed_attention_naive
from kvfix.ops.positional_attention.plans import Call, FixedPlan
from kvfix.ops.positional_attention.tiles import Tiling, share_out
from kvfix.ops.scatter_kv.naive import scatter_kv_naive
from tests.ops.devices import DEVICE, poisoned
from tests.ops.test_attention_kernel import HEADS, LAYER, Case, assert_near, packs

ROOM = 48
RULES = [{}, {"window": 9}, {"sinks": True, "softcap": 5.0}]


def rows_beyond(query: torch.Tensor) -> torch.Tensor:
    """The query in a bucket: what lies beyond the pack's rows may hold anything."""
    whole = torch.full((query.shape[0], ROOM, query.shape[2]), torch.nan, dtype=query.dtype, device=query.device)
    whole[:, : query.shape[1]] = query
    return whole


def fixed_for(pack: Pack, case: Case) -> FixedPack:
    block_dim = max(16, 1 << (case.dim - 1).bit_length())
    kind = Kind.of(pack, ROOM, case.groups)
    return FixedPack(kind, pack.parts[0], [Call(case.groups, HEADS, case.window, block_dim)])


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packs_one_after_another_in_the_same_memory(dtype, rules):
    """More documents and fewer, longer ones and shorter; rows beyond them get zeros, whatever their query is."""
    documents = [((35, 111),), ((5, 300), (30, 40), (13, 13)), ((1, 1),), ((48, 63),)]
    cases = [Case(each, dtype, groups=2, dim=16, **rules) for each in documents]
    # tiles of one size are what makes them one kind
    fixed = fixed_for(cases[0].inputs()[1], cases[0])
    where = [table.data_ptr() for table in (*fixed.tables[:4], *[p.items for p in fixed.kept.values()])]
    for case in cases:
        query, pack, clean = case.inputs()
        assert fixed.kind.takes(pack)
        fixed.load(pack)
        with poisoned():
            out = packed_attention(rows_beyond(query), fixed, LAYER, backend="triton", **case.rules())
        num_rows = query.shape[1]
        assert_near(out[:num_rows], packed_attention_naive(query, clean, LAYER, **case.rules()))
        assert (out[num_rows:] == 0).all()
    assert where == [table.data_ptr() for table in (*fixed.tables[:4], *[p.items for p in fixed.kept.values()])]


def test_rows_beyond_the_loaded_ones_are_written_nowhere():
    case = Case(((35, 111), (7, 40)), dim=16)
    _, pack, _ = case.inputs()
    _, expected, _ = case.inputs()
    rows = [torch.randn(1, HEADS, ROOM, 16, device=DEVICE) for _ in range(2)]
    fixed = fixed_for(pack, case)
    fixed.load(pack)
    scatter_kv(fixed, LAYER, *rows, backend="triton")
    scatter_kv_naive(expected, LAYER, *(part[:, :, :42] for part in rows))
    for mine, theirs in zip(pack.parts, expected.parts, strict=True):
        for name in ("keys", "values"):
            assert torch.equal(getattr(mine, name).nan_to_num(7), getattr(theirs, name).nan_to_num(7))


def test_what_there_is_no_room_for():
    case = Case(((35, 111),), dim=16)
    query, pack, _ = case.inputs()
    fixed = fixed_for(pack, case)
    assert not fixed.kind.takes(Case(((49, 111),)).inputs()[1])
    assert not fixed.kind.takes(Case(((1, 9),) * 5).inputs()[1])
    fixed.load(pack)
    with pytest.raises(ValueError, match="recorded launches were made without"):
        packed_attention(rows_beyond(query), fixed, LAYER, backend="triton", **replace(case, window=3).rules())


def test_it_holds_no_document():
    case = Case(((35, 111),), dim=16)
    _, pack, clean = case.inputs()
    fixed, kept = fixed_for(pack, case), weakref.ref(pack.parts[0].keys)
    fixed.load(pack)
    del pack, clean
    assert kept() is None


def test_kinds_differ_where_launches_would():
    one, wide = Case(((35, 111),), dim=16), Case(((35, 111),), dim=16, strided=True)
    kinds = {
        Kind.of(case.inputs()[1], rows, 2)
        for case in (one, wide, replace(one, documents=((1, 111),)))
        for rows in (48, 64)
    }
    assert len(kinds) == 6


@settings(max_examples=60)
@given(packs(), st.integers(1, 5), st.sampled_from([None, 7]), st.sampled_from([16, 64]), st.sampled_from([1, 8, 300]))
def test_the_work_of_any_pack_fits_and_is_its_own(pack, groups, window, block_rows, num_programs):
    tiling, room = Tiling(block_rows, 16, 4, 2, num_programs), pack.starts[-1] + 5
    plan = FixedPlan(Call(groups, 2, window, 4), tiling, room, len(pack.parts), torch.device(DEVICE))
    for _ in range(2):
        plan.load(pack)
    work = share_out(pack, groups, 2, window, tiling)
    items, tiles = plan.items.cpu().numpy(), plan.tiles.cpu().numpy()
    assert np.array_equal(items[: len(work.items)], work.items)
    assert not items[len(work.items) :].any()
    beyond = tiles[len(work.tiles) :]
    assert np.array_equal(tiles[: len(work.tiles)], work.tiles)
    assert not beyond[:, 3:].any()
    cells = [row * groups + c for row, c, end, *_ in beyond for c in range(c, min(end, c + block_rows))]
    assert cells == list(range(pack.starts[-1] * groups, room * groups))
