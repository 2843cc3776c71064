"""Squared deviation in Triton: a block of rows a program, heads one after another, so that sums have one order."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 16


@triton.jit
def _squares(
    one,  # [H, N, D]
    other,  # [H, N, D]
    out,  # [N] fp32
    num_heads,
    num_rows,
    one_head,
    one_row,
    one_step,
    other_head,
    other_row,
    other_step,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ADD: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    live = rows < num_rows
    mask = live[:, None] & (dims < DIM)[None]
    one += rows[:, None] * one_row + dims[None] * one_step
    other += rows[:, None] * other_row + dims[None] * other_step
    squares = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for _ in range(num_heads):
        difference = tl.load(one, mask=mask, other=0.0).to(tl.float32)
        difference -= tl.load(other, mask=mask, other=0.0).to(tl.float32)
        squares += difference * difference
        one += one_head
        other += other_head
    total = tl.sum(squares, 1)
    if ADD:
        total += tl.load(out + rows, mask=live, other=0.0)
    tl.store(out + rows, total, mask=live)


def kv_deviation_kernel(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """`kv_deviation` by the kernel: one launch a pair. Raises `ValueError` for pairs of different shapes."""
    first = pairs[0][0]
    num_rows = first.shape[1]
    out = torch.empty(num_rows, device=first.device)
    for number, (one, other) in enumerate(pairs):
        if one.shape != other.shape or one.shape[1] != num_rows:
            raise ValueError(f"states of shapes {tuple(one.shape)} and {tuple(other.shape)} for {num_rows} rows")
        _squares[(triton.cdiv(num_rows, BLOCK_ROWS),)](
            one,
            other,
            out,
            one.shape[0],
            num_rows,
            *one.stride(),
            *other.stride(),
            DIM=one.shape[2],
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_DIM=triton.next_power_of_2(one.shape[2]),
            ADD=number > 0,
        )
    return out
