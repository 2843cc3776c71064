"""The attention kernel against its twin, over documents packed together; and how its work is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfix.ops import Pack, Part, packed_attention, positional_attention
from kvfix.ops.positional_attention.naive import packed_attention_naive
from kvfix.ops.positional_attention.tiles import Tiling, choose_tiling, share_out
from tests.ops.devices import DEVICE, DTYPES, LONG, poisoned, slice_of
from tests.tolerances import ATTENTION

NEVER = torch.iinfo(torch.int64).max
HEADS, LAYERS, LAYER = 2, 2, 1


@dataclass(frozen=True)
class Case:
    """Documents as (rows, keys), and what a model says of its attention."""

    documents: tuple[tuple[int, int], ...] = ((7, 63),)
    dtype: torch.dtype = torch.float32
    dim: int = 64
    value_dim: int | None = None
    groups: int = 2
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    strided: bool = False
    tried: bool = False  # rows are text behind the document, in slots that others' rows share

    def rules(self) -> dict:
        sinks = torch.linspace(-2, 2, HEADS * self.groups, device=DEVICE) if self.sinks else None
        return {"scaling": self.dim**-0.5, "window": self.window, "softcap": self.softcap, "sinks": sinks}

    def inputs(self) -> tuple[torch.Tensor, Pack, Pack]:
        """Query, the documents, and the same with zeros for everything that may not be read."""
        generator = torch.Generator().manual_seed(0)
        num_rows = sum(rows for rows, _ in self.documents)
        query = torch.randn(HEADS * self.groups, num_rows, self.dim, generator=generator) * 3
        parts = [self._part(rows, keys, generator) for rows, keys in self.documents]
        clean = [replace(part, keys=part.keys.nan_to_num(), values=part.values.nan_to_num()) for part in parts]
        query = query.to(DEVICE, self.dtype)
        if self.strided:
            query = query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        return query, Pack(parts), Pack(clean)

    def _part(self, rows: int, keys: int, generator: torch.Generator) -> Part:
        """A cache of `LAYERS` layers, room behind and the other layers NaN."""
        chosen = torch.randperm(keys, generator=generator)[:rows].sort().values
        places = torch.arange(keys - rows, keys) if self.tried else chosen
        seen = torch.arange(keys)
        if self.tried:  # a third of the slots before belongs to others
            hidden = torch.arange(keys - rows) % 3 == 1
            seen[: keys - rows][hidden] = NEVER
        dims = (self.dim, self.dim + 3), (self.value_dim or self.dim, 2 * (self.value_dim or self.dim))
        tensors = [self._cache(keys, dim, wide if self.strided else dim, seen, generator) for dim, wide in dims]
        return Part(*tensors, places, keys, places, seen if self.tried else None)

    def _cache(self, keys: int, dim: int, wide: int, seen: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Rows `wide` numbers apart, of which `dim` count: the first, or every other one."""
        own = slice(None, None, 2) if wide == 2 * dim else slice(dim)
        cache = torch.full((LAYERS, HEADS, keys + 9, wide), torch.nan)
        cache[LAYER, :, :keys, own] = torch.randn(HEADS, keys, dim, generator=generator)
        cache[LAYER, :, :keys][:, seen == NEVER] = torch.nan
        return cache.to(DEVICE, self.dtype)[..., own]


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    difference, size = (t.double().square().mean().sqrt() for t in (out.double() - expected.double(), expected))
    # NaN compares false
    assert difference <= ATTENTION[out.dtype] * size


def check(case: Case, tiling: Tiling | None = None) -> torch.Tensor:
    from kvfix.ops.positional_attention.kernel import packed_attention_kernel

    query, pack, clean = case.inputs()
    with poisoned():
        out = packed_attention_kernel(query, pack, LAYER, tiling=tiling, **case.rules())
    assert_near(out, packed_attention_naive(query, clean, LAYER, **case.rules()))
    return out


DOCUMENTS = [((1, 1),), ((1, 111),), ((7, 63),), ((63, 63),), ((35, 111), (1, 40), (13, 13)), ((9, 63), (9, 300))]
DIMS = [(64, None), (80, None), (96, None), (128, None), (64, 24), (24, 64), (256, None)]
GROUPS = [1, 3, 4, 7]
RULES = [
    {},
    {"window": 5},
    {"window": 40, "softcap": 5.0},
    {"softcap": 50.0},
    {"sinks": True},
    {"sinks": True, "window": 5, "softcap": 30.0},
    {"tried": True},
    {"tried": True, "window": 40, "sinks": True},
]
TABLE = [
    Case(documents, dtype, *dims, groups, **rules, strided=(number // 8) % 2 == 1)
    for number, (documents, dtype, dims, groups, rules) in enumerate(product(DOCUMENTS, DTYPES, DIMS, GROUPS, RULES))
]
SLICE = random.Random(8).sample(TABLE, 24)


@pytest.mark.parametrize("case", TABLE if LONG else SLICE, ids=str)
def test_equals_the_naive_twin(case):
    check(case)


def test_the_slice_has_every_value_of_the_table():
    for field in fields(Case):
        assert {getattr(case, field.name) for case in SLICE} == {getattr(case, field.name) for case in TABLE}
    for dtype in DTYPES:
        assert {case.strided for case in SLICE if case.dtype == dtype} == {False, True}


# one run of keys a tile; many; more cells than a document has; runs that end where others go on
TILINGS = [Tiling(16, 16, 4, 2, 1), Tiling(16, 16, 4, 2, 64), Tiling(64, 32, 4, 2, 64), Tiling(32, 64, 4, 2, 6)]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(
    "case",
    slice_of([Case(((11, 90), (3, 70)), groups=2, dim=16, **rules) for rules in RULES], 4),
    ids=str,
)
def test_does_not_depend_on_how_the_work_is_cut(case, tiling):
    check(case, tiling)


def test_a_row_depends_on_what_it_sees_and_on_nothing_else():
    """Of its own document, too: change one key of one document, and only the rows that see it may change."""
    case = Case(((40, 40), (40, 40)), window=9, groups=1, dim=16)
    query, pack, _ = case.inputs()
    before = packed_attention(query, pack, LAYER, backend="triton", **case.rules())
    pack.parts[1].keys[LAYER, :, 20] += 5
    after = packed_attention(query, pack, LAYER, backend="triton", **case.rules())
    changed = {row for row in range(80) if not torch.equal(before[row], after[row])}
    assert changed == set(range(60, 69))


def test_one_document_by_name():
    case = Case(((33, 111),), groups=3, softcap=5.0)
    query, pack, _ = case.inputs()
    (part,) = pack.parts
    out = positional_attention(query, *part.seen(LAYER), part.positions, backend="triton", **case.rules())
    assert_near(out, packed_attention_naive(query, pack, LAYER, **case.rules()))


def test_small_scores_keep_their_digits_under_a_softcap():
    """Where tanh is nearly its argument, a form that cancels would be off by a score's size."""
    from kvfix.ops.positional_attention.kernel import packed_attention_kernel

    case = Case(((9, 200),), softcap=3000.0, dim=16)
    query, pack, clean = case.inputs()
    out = packed_attention_kernel(query, pack, LAYER, **case.rules())
    assert_near(out, packed_attention_naive(query, clean, LAYER, **case.rules()))


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (Case(dim=272), {}, "272"),
        (Case(), {"dtype": torch.float16}, "float16"),
    ],
)
def test_what_it_cannot_do_is_said(case, change, message):
    query, pack, _ = case.inputs()
    with pytest.raises(ValueError, match=message):
        packed_attention(query.to(change.get("dtype", query.dtype)), pack, LAYER, backend="triton", **case.rules())


@pytest.mark.parametrize("change", [{"dtype": torch.float16}, {"dim": 32}], ids=str)
def test_documents_of_one_call_must_be_alike(change):
    one, other = (case.inputs()[1].parts[0] for case in (Case(), replace(Case(), **change)))
    with pytest.raises(ValueError, match="of one call differ"):
        _ = Pack([one, other]).tables


# ---- cutting the work


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        num_keys = draw(st.integers(1, 300))
        positions = sorted(draw(st.sets(st.integers(0, num_keys - 1), min_size=1, max_size=60)))
        seen = torch.arange(num_keys) if draw(st.booleans()) else None
        empty = torch.empty(1, 2, num_keys, 4)
        parts.append(Part(empty, empty, torch.tensor(positions), num_keys, key_positions=seen))
    return Pack(parts)


@settings(max_examples=50)
@given(
    packs(),
    st.integers(1, 5),
    st.sampled_from([None, 1, 7, 100]),
    st.sampled_from([16, 64]),
    st.sampled_from([16, 32]),
    st.sampled_from([1, 8, 300]),
)
def test_every_row_meets_every_key_it_sees_once(pack, groups, window, block_rows, block_keys, num_programs):
    work = share_out(pack, groups, 2, window, Tiling(block_rows, block_keys, 4, 2, num_programs))
    met = [np.zeros((len(part.positions) * groups, part.num_seen), int) for part in pack.parts]
    for first_row, cell, end, first_item, num_items in work.tiles:
        assert 0 < min(end, cell + block_rows) - cell <= block_rows
        for part, row, start, limit, key, end_key in work.items[first_item : first_item + num_items]:
            assert (row, start, limit) == (first_row, cell, end)
            assert first_row == pack.starts[part]
            met[part][cell : min(end, cell + block_rows), key:end_key] += 1
    for part, count in zip(pack.parts, met, strict=True):
        positions = np.repeat(part.positions.numpy(), groups)[:, None]
        keys = np.arange(part.num_seen)[None]
        sees = (keys <= positions) & (keys > positions - (window or 10**9))
        assert (count[sees] == 1).all()
        assert count.max() <= 1
    assert sum(work.tiles[:, 4]) == len(work.items)


@pytest.mark.parametrize(("rows", "split"), [(35, True), (4096, False)])
def test_few_rows_are_split_and_many_are_not(rows, split):
    """Llama-3.1-8B's heads on 132 processors: a repair's rows alone would keep 24 of them busy."""
    empty = torch.empty(1, 8, 8192, 1)
    pack = Pack([Part(empty, empty, torch.arange(8192 - rows, 8192), 8192)])
    tiling = choose_tiling(rows * 4, 128, 2, 132)
    work = share_out(pack, 4, 8, None, tiling)
    assert work.split == split
    assert len(work.items) * 8 >= 132
    assert split is False or len(work.items) * 8 <= 2 * 132 + 8 * len(work.tiles)
