"""Row scatter in Triton: one program a row and layer, all heads, keys and values of all documents in one launch."""

import torch
import triton
import triton.language as tl

from kvfix.ops.packing import Pack


@triton.jit
def _copy_row(source, source_head, source_step, target, target_head, target_step, live, dims, DIM: tl.constexpr):
    """One row of all heads: `[BLOCK_HEADS, BLOCK_DIM]`."""
    heads = tl.arange(0, live.shape[0]).to(tl.int64)[:, None]
    mask = live[:, None] & (dims < DIM)[None]
    row = tl.load(source + heads * source_head + dims[None] * source_step, mask=mask, other=0.0)
    tl.store(target + heads * target_head + dims[None] * target_step, row, mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _scatter(
    keys,  # [l, H, M, D]
    values,  # [l, H, M, Dv]
    documents,  # [parts, 9] int64
    part_of_row,  # [M] int64
    slots,  # [M] int64; -1: nowhere
    layer,
    num_heads,
    key_layer,
    key_head,
    key_row,
    key_step,
    value_layer,
    value_head,
    value_row,
    value_step,
    target_key_step,
    target_value_step,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    row, nth = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    document = documents + tl.load(part_of_row + row) * 9
    slot = tl.load(slots + row)
    live = (tl.arange(0, BLOCK_HEADS) < num_heads) & (slot >= 0)

    place = (layer + nth) * tl.load(document + 2) + slot * tl.load(document + 4)
    target = tl.load(document).to(tl.pointer_type(keys.dtype.element_ty)) + tl.multiple_of(place, ALIGNMENT)
    target_head = tl.multiple_of(tl.load(document + 3), ALIGNMENT)
    source = keys + nth * key_layer + row * key_row
    _copy_row(source, key_head, key_step, target, target_head, target_key_step, live, tl.arange(0, BLOCK_DIM), DIM)

    place = (layer + nth) * tl.load(document + 5) + slot * tl.load(document + 7)
    target = tl.load(document + 1).to(tl.pointer_type(values.dtype.element_ty)) + tl.multiple_of(place, ALIGNMENT)
    target_head = tl.multiple_of(tl.load(document + 6), ALIGNMENT)
    source = values + nth * value_layer + row * value_row
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    _copy_row(source, value_head, value_step, target, target_head, target_value_step, live, value_dims, VALUE_DIM)


def scatter_kv_kernel(pack: Pack, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`scatter_kv` by the kernel. Raises `ValueError` for rows of another dtype than the documents'."""
    tables, first = pack.tables, pack.parts[0]
    if keys.dtype != first.keys.dtype or values.dtype != first.values.dtype:
        raise ValueError(f"rows in {keys.dtype} and {values.dtype} for a cache in {first.keys.dtype}")
    num_layers, num_heads, num_rows, dim = keys.shape
    value_dim = values.shape[3]
    _scatter[(num_rows, num_layers)](
        keys,
        values,
        tables.documents,
        tables.part_of_row,
        tables.slots,
        layer,
        num_heads,
        *keys.stride(),
        *values.stride(),
        tables.key_step,
        tables.value_step,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_DIM=triton.next_power_of_2(dim),
        BLOCK_VALUE_DIM=triton.next_power_of_2(value_dim),
        ALIGNMENT=tables.alignment,
    )
