"""Key rotation in Triton: every row of every layer is read once and written once, gathered and turned on the way."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvfix.ops.rotate_keys.runs import Move, Rotation

BLOCK_ROWS = 16


@triton.jit
def _rotate(
    keys,  # [L, H, N, D]
    source,  # [L, H, rows, D]; keys themselves unless GATHER
    layers,  # [l, 2] int32: layer, number of its pairs
    moved,  # [R, 3] int64: row of keys, row of source, number of the move
    cos,  # [l, moves, PAIRS] fp32
    sin,
    num_rows,
    num_moves,
    key_layer,
    key_head,
    key_row,
    key_step,
    source_layer,
    source_head,
    source_row,
    source_step,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATHER: tl.constexpr,
):
    nth, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    layer, num_pairs = tl.load(layers + nth * 2).to(tl.int64), tl.load(layers + nth * 2 + 1)
    numbers = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = numbers < num_rows
    to = keys + layer * key_layer + head * key_head + tl.load(moved + numbers * 3, mask=live, other=0) * key_row
    row = tl.load(moved + numbers * 3 + 1, mask=live, other=0)
    come = source + layer * source_layer + head * source_head + row * source_row

    pairs = tl.arange(0, BLOCK_PAIRS)
    first = pairs * 2 if INTERLEAVED else pairs
    second = pairs * 2 + 1 if INTERLEAVED else pairs + num_pairs
    mask = live[:, None] & (pairs < num_pairs)[None]
    one = tl.load(come[:, None] + first[None] * source_step, mask=mask, other=0.0).to(tl.float32)
    two = tl.load(come[:, None] + second[None] * source_step, mask=mask, other=0.0).to(tl.float32)
    move = nth * num_moves + tl.load(moved + numbers * 3 + 2, mask=live, other=0)
    angle = move[:, None] * PAIRS + pairs[None]
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    tl.store(to[:, None] + first[None] * key_step, (one * c - two * s).to(keys.dtype.element_ty), mask=mask)
    tl.store(to[:, None] + second[None] * key_step, (two * c + one * s).to(keys.dtype.element_ty), mask=mask)
    if GATHER:
        # dims that do not turn
        dims = tl.arange(0, BLOCK_DIM)
        rest = live[:, None] & ((dims >= 2 * num_pairs) & (dims < DIM))[None]
        kept = tl.load(come[:, None] + dims[None] * source_step, mask=rest, other=0.0)
        tl.store(to[:, None] + dims[None] * key_step, kept, mask=rest)


def rotate_keys_kernel(
    keys: torch.Tensor,  # [L, H, N, D], changed in place
    moves: Sequence[Move],
    rotations: Sequence[Rotation],
    source: torch.Tensor | None,
) -> None:
    """`rotate_keys` by the kernel: one launch for each way of pairing among the layers, in practice one.

    Raises `ValueError` for a source of another dtype.
    """
    if source is not None and source.dtype != keys.dtype:
        raise ValueError(f"keys in {source.dtype} for a cache in {keys.dtype}")
    moved = _moved_rows(moves, source is not None).to(keys.device)
    for interleaved in (False, True):
        layers = [
            number
            for number, rotation in enumerate(rotations)
            if rotation.interleaved == interleaved and (len(rotation.inv_freq) or source is not None)
        ]
        if layers:
            _launch(keys, keys if source is None else source, layers, moved, moves, rotations)


def _launch(
    keys: torch.Tensor,
    source: torch.Tensor,
    layers: list[int],
    moved: torch.Tensor,
    moves: Sequence[Move],
    rotations: Sequence[Rotation],
) -> None:
    counts = [len(rotations[number].inv_freq) for number in layers]
    num_pairs, dim = max(counts), keys.shape[3]
    cos, sin = _angles(layers, moves, rotations, max(1, num_pairs))
    _rotate[(triton.cdiv(len(moved), BLOCK_ROWS), keys.shape[1], len(layers))](
        keys,
        source,
        torch.tensor([layers, counts], dtype=torch.int32).T.contiguous().to(keys.device),
        moved,
        cos.to(keys.device),
        sin.to(keys.device),
        len(moved),
        len(moves),
        *keys.stride(),
        *source.stride(),
        DIM=dim,
        PAIRS=max(1, num_pairs),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_PAIRS=triton.next_power_of_2(max(1, num_pairs)),
        BLOCK_DIM=triton.next_power_of_2(dim),
        INTERLEAVED=rotations[layers[0]].interleaved,
        GATHER=source is not keys,
    )


def _moved_rows(moves: Sequence[Move], gather: bool) -> torch.Tensor:
    """`[R, 3]` int64: each row, the row it comes from, the number of its move."""
    rows = np.concatenate([np.arange(move.start, move.end) for move in moves])
    come = np.concatenate([move.row + np.arange(move.end - move.start) for move in moves]) if gather else rows
    number = np.repeat(np.arange(len(moves)), [move.end - move.start for move in moves])
    return torch.from_numpy(np.column_stack([rows, come, number]))


def _angles(
    layers: list[int], moves: Sequence[Move], rotations: Sequence[Rotation], num_pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine `[l, moves, num_pairs]` of each layer's angles: fp32 of fp64, as far moves take many turns."""
    deltas = torch.tensor([move.delta for move in moves], dtype=torch.float64)
    angles = torch.zeros(len(layers), len(moves), num_pairs, dtype=torch.float64)
    for nth, number in enumerate(layers):
        inv_freq = torch.tensor(rotations[number].inv_freq, dtype=torch.float32).double()
        angles[nth, :, : len(inv_freq)] = deltas[:, None] * inv_freq
    return angles.cos().float(), angles.sin().float()
