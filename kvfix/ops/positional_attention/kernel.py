"""Positional attention in Triton: tiles of rows against runs of keys, and a second pass that joins the runs.

The query heads of one key head share its keys and values: their rows are the rows of one tile. Runs of one tile's keys
go to several programs, so that a few rows fill the device too (flash-decoding); each keeps a running maximum, sum and
weighted values in fp32. No mask is ever in memory. Offsets are 64 bits wide.
"""

import math

import torch
import triton
import triton.language as tl

from kvfix.ops.backend import interpreted
from kvfix.ops.packing import Pack
from kvfix.ops.positional_attention.plans import Call, plan_of
from kvfix.ops.positional_attention.tiles import Tiling

LOG2_E = math.log2(math.e)
JOIN_ROWS = 8
MAX_DIM = 256


@triton.jit
def _tanh(x):
    """Exact to fp32 near 0 too, where the exponential's form cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def _finish(acc, peak, total, sinks, heads, live, SINKS: tl.constexpr):
    """Weighted values over their weights, 0 for a row that saw nothing; sinks take a share without a value."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(peak, sink)
        fade = tl.exp2(peak - top)
        total = total * fade + tl.exp2(sink - top)
        acc = acc * fade[:, None]
    # NaN is not 0, and stays
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["layer"])
def _attend(
    query,  # [Hq, M, D]
    out,  # [M, Hq, Dv]
    partial,  # fp32: [W, H, BLOCK_ROWS, BLOCK_VALUE_DIM] values, [W, H, BLOCK_ROWS] peaks, the same of sums
    documents,  # [parts, 9] int64
    positions,  # [M] int32
    key_positions,  # int32
    items,  # [W, 6] int32
    sinks,  # [Hq]
    layer,
    query_head,
    query_row,
    query_step,
    key_step,
    value_step,
    scale,  # of a score, times log2(e) unless it is capped
    softcap,
    window,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    KEY_POSITIONS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    item = items + number * 6
    document = documents + tl.load(item) * 9
    first_key, end_key = tl.load(item + 4), tl.load(item + 5)

    cells = tl.load(item + 2) + tl.arange(0, BLOCK_ROWS)
    live = cells < tl.load(item + 3)
    rows = (tl.load(item + 1) + cells // GROUPS).to(tl.int64)
    heads = (head * GROUPS + cells % GROUPS).to(tl.int64)
    at = tl.load(positions + rows, mask=live, other=-1)

    dims, value_dims = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE_DIM)
    q_mask = live[:, None] & (dims < DIM)[None]
    q_at = heads[:, None] * query_head + rows[:, None] * query_row + dims[None] * query_step
    q = tl.load(query + q_at, mask=q_mask, other=0.0)  # [BLOCK_ROWS, BLOCK_DIM]
    if UPCAST:
        q = q.to(tl.float32)

    key_row = tl.multiple_of(tl.load(document + 4), ALIGNMENT)
    value_row = tl.multiple_of(tl.load(document + 7), ALIGNMENT)
    key_offset = layer * tl.load(document + 2) + head * tl.load(document + 3)
    value_offset = layer * tl.load(document + 5) + head * tl.load(document + 6)
    keys = tl.load(document).to(tl.pointer_type(query.dtype.element_ty)) + tl.multiple_of(key_offset, ALIGNMENT)
    values = tl.load(document + 1).to(tl.pointer_type(query.dtype.element_ty)) + tl.multiple_of(value_offset, ALIGNMENT)
    if ALIGNMENT > 1:
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    places = key_positions + tl.load(document + 8)

    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_DIM], tl.float32)
    for start in tl.range(first_key, end_key, BLOCK_KEYS, num_stages=STAGES):
        slots = start + tl.arange(0, BLOCK_KEYS)
        inside = slots < end_key
        if KEY_POSITIONS:
            where = tl.load(places + slots, mask=inside, other=2147483647)
            # what no row sees may hold anything
            inside = inside & (where < 2147483647)
        else:
            where = slots
        k_at = slots[:, None].to(tl.int64) * key_row + dims[None] * key_step
        k_mask = inside[:, None] if DIM == BLOCK_DIM else inside[:, None] & (dims < DIM)[None]
        k = tl.load(keys + k_at, mask=k_mask, other=0.0)  # [BLOCK_KEYS, BLOCK_DIM]
        v_at = slots[:, None].to(tl.int64) * value_row + value_dims[None] * value_step
        v_mask = inside[:, None] if VALUE_DIM == BLOCK_VALUE_DIM else inside[:, None] & (value_dims < VALUE_DIM)[None]
        v = tl.load(values + v_at, mask=v_mask, other=0.0)  # [BLOCK_KEYS, BLOCK_VALUE_DIM]
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_ROWS, BLOCK_KEYS]
        if SOFTCAP:
            scores = _tanh(scores / softcap) * (softcap * 1.4426950408889634)
        visible = inside[None] & (where[None] <= at[:, None])
        if WINDOW:
            visible = visible & (where[None] > at[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        # a row that has seen nothing yet keeps weights of 0, not of exp(-inf + inf)
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        weights = weights.to(v.dtype)
        if UPCAST:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(weights, v, acc, input_precision="ieee")
        peak = top

    if SPLIT:
        cell = (number.to(tl.int64) * num_heads + head) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        num_cells = tl.num_programs(0).to(tl.int64) * num_heads * BLOCK_ROWS
        tl.store(partial + cell[:, None] * BLOCK_VALUE_DIM + value_dims[None], acc, mask=live[:, None])
        tl.store(partial + num_cells * BLOCK_VALUE_DIM + cell, peak, mask=live)
        tl.store(partial + num_cells * (BLOCK_VALUE_DIM + 1) + cell, total, mask=live)
    else:
        acc = _finish(acc, peak, total, sinks, heads, live, SINKS)
        o_at = (rows[:, None] * num_heads * GROUPS + heads[:, None]) * VALUE_DIM + value_dims[None]
        o_mask = live[:, None] & (value_dims < VALUE_DIM)[None]
        tl.store(out + o_at, acc.to(out.dtype.element_ty), mask=o_mask)


@triton.jit(do_not_specialize=["num_items"])
def _join(
    partial,
    out,  # [M, Hq, Dv]
    tiles,  # [T, 5] int32
    sinks,  # [Hq]
    num_items,  # of all tiles
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The runs of one tile's keys into its rows' outputs, `ROWS` cells a program."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    tile = tiles + tl.program_id(0) * 5
    own = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    cells = tl.load(tile + 1) + own
    live = cells < tl.load(tile + 2)
    rows = (tl.load(tile) + cells // GROUPS).to(tl.int64)
    heads = (head * GROUPS + cells % GROUPS).to(tl.int64)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    num_cells = num_items.to(tl.int64) * num_heads * BLOCK_ROWS

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_VALUE_DIM], tl.float32)
    cell = (tl.load(tile + 3).to(tl.int64) * num_heads + head) * BLOCK_ROWS + own
    for _ in range(tl.load(tile + 4)):
        peak_here = tl.load(partial + num_cells * BLOCK_VALUE_DIM + cell, mask=live, other=float("-inf"))
        total_here = tl.load(partial + num_cells * (BLOCK_VALUE_DIM + 1) + cell, mask=live, other=0.0)
        acc_here = tl.load(partial + cell[:, None] * BLOCK_VALUE_DIM + value_dims[None], mask=live[:, None], other=0.0)
        top = tl.maximum(peak, peak_here)
        base = tl.where(top == float("-inf"), 0.0, top)
        fade, fade_here = tl.exp2(peak - base), tl.exp2(peak_here - base)
        total = total * fade + total_here * fade_here
        acc = acc * fade[:, None] + acc_here * fade_here[:, None]
        peak = top
        cell += num_heads * BLOCK_ROWS
    acc = _finish(acc, peak, total, sinks, heads, live, SINKS)
    o_at = (rows[:, None] * num_heads * GROUPS + heads[:, None]) * VALUE_DIM + value_dims[None]
    o_mask = live[:, None] & (value_dims < VALUE_DIM)[None]
    tl.store(out + o_at, acc.to(out.dtype.element_ty), mask=o_mask)


def packed_attention_kernel(
    query: torch.Tensor,  # [Hq, M, D]
    pack: Pack,
    layer: int,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`packed_attention` by the kernel; `tiling` None: as `choose_tiling` has it.

    Raises `ValueError` for head dims beyond 256, and for a dtype other than the keys'.
    """
    tables, first = pack.tables, pack.parts[0]
    num_heads, dim, value_dim = first.keys.shape[1], first.keys.shape[3], first.values.shape[3]
    _check(query, first.keys, first.values)
    groups, num_rows = query.shape[0] // num_heads, query.shape[1]
    block_dim, block_value_dim = (max(16, triton.next_power_of_2(d)) for d in (dim, value_dim))
    plan = plan_of(pack, Call(groups, num_heads, window, block_value_dim), tiling)
    out = torch.empty(num_rows, query.shape[0], value_dim, dtype=query.dtype, device=query.device)
    shared = {
        "GROUPS": groups,
        "VALUE_DIM": value_dim,
        "BLOCK_ROWS": plan.tiling.block_rows,
        "BLOCK_VALUE_DIM": block_value_dim,
        "SINKS": sinks is not None,
    }
    given_sinks = query if sinks is None else sinks.contiguous()
    _attend[(len(plan.items), num_heads)](
        query,
        out,
        plan.partial,
        tables.documents,
        tables.positions,
        tables.key_positions,
        plan.items,
        given_sinks,
        layer,
        *query.stride(),
        tables.key_step,
        tables.value_step,
        scaling if softcap is not None else scaling * LOG2_E,
        softcap or 0.0,
        window or 0,
        DIM=dim,
        BLOCK_KEYS=plan.tiling.block_keys,
        BLOCK_DIM=block_dim,
        SPLIT=plan.split,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        KEY_POSITIONS=len(tables.key_positions) > 0,
        ALIGNMENT=tables.alignment,
        # the interpreter keeps bfloat16 as bare bits, which it cannot multiply
        UPCAST=interpreted(),
        STAGES=plan.tiling.num_stages,
        num_warps=plan.tiling.num_warps,
        **shared,
    )
    if plan.split:
        rows = min(JOIN_ROWS, plan.tiling.block_rows)
        grid = (len(plan.tiles), num_heads, plan.tiling.block_rows // rows)
        _join[grid](plan.partial, out, plan.tiles, given_sinks, len(plan.items), ROWS=rows, **shared)
    return out


def _check(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(f"query, keys and values differ in dtype: {query.dtype}, {keys.dtype}, {values.dtype}")
    if max(keys.shape[3], values.shape[3]) > MAX_DIM:
        raise ValueError(f"head dims {keys.shape[3]} and {values.shape[3]}; the kernel takes at most {MAX_DIM}")
