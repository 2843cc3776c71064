"""Attention masked by position against one dense mask and one softmax."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvfix.ops import positional_attention
from kvfix.ops.positional_attention.naive import positional_attention_naive
from tests.tolerances import ATTENTION

LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Case:
    """Sizes of one call, and what beside position decides a score."""

    rows: int
    keys: int
    heads: int = 2
    groups: int = 2
    dim: int = 16
    value_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scattered: bool = False  # rows anywhere; else the last ones

    def positions(self) -> torch.Tensor:
        if not self.scattered:
            return torch.arange(self.keys - self.rows, self.keys)
        chosen = torch.randperm(self.keys, generator=torch.Generator().manual_seed(1))[: self.rows]
        return chosen.sort().values

    def rules(self) -> dict:
        sinks = torch.linspace(-2, 2, self.heads * self.groups) if self.sinks else None
        return {"scaling": self.dim**-0.5, "window": self.window, "softcap": self.softcap, "sinks": sinks}

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [
            (self.heads * self.groups, self.rows, self.dim),
            (self.heads, self.keys, self.dim),
            (self.heads, self.keys, self.value_dim or self.dim),
        ]
        query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
        # sharp scores: a row too many or too few shows
        return (query * 3).to(dtype), keys.to(dtype), values.to(dtype)


CASES = [
    Case(1, 1),
    Case(1, 400),
    Case(7, 63),
    Case(33, 111, groups=1),
    Case(33, 111, groups=3, dim=8),
    Case(63, 200, heads=1, groups=4, dim=80),
    Case(63, 63, dim=64),
    Case(111, 111, groups=4, value_dim=24),
    Case(300, 300),
    Case(300, 397),
    Case(7, 300, scattered=True),
    Case(111, 400, scattered=True, groups=3),
    Case(300, 400, scattered=True),
    Case(300, 300, window=1),
    Case(300, 397, window=5),
    Case(111, 400, window=40, scattered=True),
    Case(63, 63, window=40),
    Case(63, 63, window=63),
    Case(63, 63, window=62),
    Case(300, 397, window=1000),
    Case(300, 300, window=1000),
    Case(33, 111, softcap=5.0),
    Case(111, 111, softcap=50.0, groups=4),
    Case(300, 397, softcap=5.0, window=40, scattered=True),
    Case(33, 111, sinks=True),
    Case(300, 300, sinks=True, groups=4, dim=64),
    Case(300, 397, sinks=True, window=5, scattered=True),
    Case(111, 300, sinks=True, softcap=5.0, window=40, value_dim=8),
]


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the expected values'."""
    out, expected = out.double(), expected.double()
    return float((out - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == expected.shape
    # NaN compares false
    assert error(out, expected) <= ATTENTION[out.dtype]


@pytest.mark.parametrize("dtype", list(ATTENTION), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_naive_twin(case, dtype):
    query, keys, values = case.tensors(dtype)
    out = positional_attention(query, keys, values, case.positions(), **case.rules())
    assert out.dtype == dtype
    assert_near(out, positional_attention_naive(query, keys, values, case.positions(), **case.rules()))


@pytest.mark.parametrize("dtype", list(ATTENTION), ids=str)
@pytest.mark.parametrize("case", [CASES[4], CASES[7], CASES[11], CASES[23], CASES[26]], ids=str)
def test_takes_views_of_larger_tensors(case, dtype):
    """As a cache gives them: heads far apart, room behind, the query transposed."""
    query, keys, values = case.tensors(dtype)
    wide_query = query.transpose(0, 1).contiguous().transpose(0, 1)
    wide_keys = torch.full((3, case.heads, case.keys + 50, case.dim), torch.nan, dtype=dtype)
    wide_values = torch.full((3, case.heads, case.keys + 50, values.shape[-1] + 3), torch.nan, dtype=dtype)
    wide_keys[1, :, 20 : 20 + case.keys] = keys
    wide_values[1, :, 20 : 20 + case.keys, : values.shape[-1]] = values
    out = positional_attention(
        wide_query,
        wide_keys[1, :, 20 : 20 + case.keys],
        wide_values[1, :, 20 : 20 + case.keys, : values.shape[-1]],
        case.positions(),
        **case.rules(),
    )
    assert_near(out, positional_attention_naive(query, keys, values, case.positions(), **case.rules()))


@pytest.mark.parametrize(
    "case",
    [
        Case(7, 63),
        Case(33, 200, scattered=True),
        Case(300, 400, scattered=True),
        Case(33, 200, window=5),
        Case(33, 200, window=40, scattered=True, sinks=True),
        Case(33, 200, softcap=5.0),
    ],
    ids=str,
)
def test_rows_that_may_not_be_read_are_not_touched(case):
    """Rows past the last position, and before the first row's window, hold NaN: a weight of 0 would spread it."""
    query, keys, values = case.tensors()
    positions = replace(case, keys=case.keys - 20).positions()
    expected = positional_attention_naive(query, keys, values, positions, **case.rules())
    last = int(positions[-1])
    first = max(0, int(positions[0]) - case.window + 1) if case.window else 0
    for tensor in (keys, values):
        tensor[:, last + 1 :] = torch.nan
        tensor[:, :first] = torch.nan
    assert_near(positional_attention(query, keys, values, positions, **case.rules()), expected)


@pytest.mark.parametrize("rules", [{}, {"window": 5}, {"window": 40}, {"softcap": 5.0}, {"sinks": True}], ids=str)
def test_a_row_depends_on_what_it_sees_and_on_nothing_else(rules):
    """The mask, checked by hand: change one key and value, and only the rows that see it may change."""
    case = Case(50, 50, **rules)
    query, keys, values = case.tensors()
    before = positional_attention(query, keys, values, case.positions(), **case.rules())
    place = 20
    keys[:, place] += 5
    values[:, place] += 5
    after = positional_attention(query, keys, values, case.positions(), **case.rules())
    changed = {row for row in range(50) if not torch.equal(before[row], after[row])}
    end = 50 if case.window is None else min(50, place + case.window)
    assert changed == set(range(place, end))


@pytest.mark.parametrize("rules", [{}, {"window": 40}, {"softcap": 5.0}, {"sinks": True, "window": 5}], ids=str)
def test_key_positions_hide_what_stands_elsewhere(rules):
    """Three continuations share the room behind 40 rows: each sees the document and itself."""
    case = Case(9, 70, **rules)
    query, keys, values = case.tensors()
    mine = torch.arange(50, 59)
    seen = torch.full((59,), LAST)
    seen[:40], seen[mine] = torch.arange(40), 40 + torch.arange(9)
    positions = 40 + torch.arange(9)
    out = positional_attention(query, keys[:, :59], values[:, :59], positions, key_positions=seen, **case.rules())
    alone = torch.cat([torch.arange(40), mine])
    assert_near(out, positional_attention_naive(query, keys[:, alone], values[:, alone], positions, **case.rules()))
    assert_near(
        out,
        positional_attention_naive(query, keys[:, :59], values[:, :59], positions, key_positions=seen, **case.rules()),
    )


def test_key_positions_may_have_gaps():
    case = Case(5, 40, window=10)
    query, keys, values = case.tensors()
    places = torch.arange(40) * 3
    positions = torch.tensor([6, 30, 31, 90, 117])
    out = positional_attention(query, keys, values, positions, key_positions=places, **case.rules())
    for row, position in enumerate(positions.tolist()):
        seen = [n for n in range(40) if position - 10 < 3 * n <= position]
        single = replace(case, window=None).rules()
        expected = positional_attention_naive(
            query[:, row : row + 1], keys[:, seen], values[:, seen], torch.tensor([LAST]), **single
        )
        assert_near(out[row : row + 1], expected)


def test_blocks_agree_with_one_pass_over_each_row():
    """Rows on both sides of a block's edge."""
    case = Case(300, 397, window=40)
    query, keys, values = case.tensors()
    positions = case.positions()
    whole = positional_attention(query, keys, values, positions, **case.rules())
    for row in (0, 255, 256, 257, 299):
        single = positional_attention(query[:, row : row + 1], keys, values, positions[row : row + 1], **case.rules())
        assert_near(whole[row : row + 1], single)


def test_a_whole_sequence_takes_the_causal_path(monkeypatch):
    """SDPA masks a whole sequence by itself at half the cost; anything else must not ask it to."""
    from kvfix.ops.positional_attention import blocked

    asked = []
    real = blocked.scaled_dot_product_attention
    monkeypatch.setattr(
        blocked,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: (asked.append(kwargs.get("is_causal", False)), real(*args, **kwargs))[1],
    )
    for case in (Case(63, 63), Case(63, 63, window=63), Case(62, 63), Case(63, 63, window=62)):
        positional_attention(*case.tensors(), case.positions(), **case.rules())
    assert asked == [True, True, False, False]
