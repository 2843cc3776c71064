"""How the attention kernel cuts a call into programs: tiles of rows, and runs of keys for each tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvfix.ops.packing import Pack, Part


class Tiling(NamedTuple):
    """Sizes of a program's work."""

    block_rows: int  # query rows x query heads of one key head
    block_keys: int
    num_warps: int
    num_stages: int
    num_programs: int  # enough to fill the device; keys are split until there are so many


class Work(NamedTuple):
    """What each program does; a row attends to keys of several items if its tile's keys are split."""

    items: np.ndarray  # [W, 6] int32: part, first row of the part, first cell, end of cells, first key, end of keys
    tiles: np.ndarray  # [T, 5] int32: first row of the part, first cell, end of cells, first item, number of items

    @property
    def split(self) -> bool:
        return len(self.items) != len(self.tiles)


def choose_tiling(num_cells: int, dim: int, element_size: int, num_processors: int) -> Tiling:
    """Tiles for parts of at most `num_cells` cells (rows x heads of a group), `dim` the larger of key and value dim.

    Tensor cores take 64 rows at a time; a part of up to 192 cells wastes less of them in tiles of 64 than of 128. In
    fp32 there are none, and larger tiles than these do not fit the registers.
    """
    num_programs = 2 * num_processors
    if element_size == 4:
        small = num_cells <= 16 or dim > 128
        return Tiling(16 if small else 32, 32 if small else 16, 8, 2, num_programs)
    most = 128 if num_cells > 192 and dim <= 128 else 64
    block_rows = next(size for size in (16, 32, 64, 128) if size >= min(num_cells, most))
    if dim > 128:
        return Tiling(block_rows, 32, 8, 2, num_programs)
    return Tiling(block_rows, 64, 8 if block_rows == 128 else 4, 3, num_programs)


def share_out(pack: Pack, groups: int, num_heads: int, window: int | None, tiling: Tiling) -> Work:
    """The work of one call with `num_heads` key heads and `groups` query heads for each.

    A cell is one row of one query head: cell c of a part is row c // groups, head c % groups of the group.
    """
    tiles = [_tiles(part, number, rows.start, groups, window, tiling) for number, (part, rows) in enumerate(pack)]
    cut = np.concatenate(tiles)  # [T, 6]
    blocks = -(-(cut[:, 5] - cut[:, 4]) // tiling.block_keys)
    wanted = max(1, tiling.num_programs // num_heads)
    # a run of fewer blocks costs more in partial results than another program brings
    run = max(4, -(-int(blocks.sum()) // wanted)) if len(cut) < wanted else max(1, int(blocks.max()))
    num_items = np.maximum(1, -(-blocks // run))
    ends = np.cumsum(num_items)
    items = np.repeat(cut, num_items, axis=0)
    nth = np.arange(len(items)) - np.repeat(ends - num_items, num_items)
    items[:, 4] += nth * run * tiling.block_keys
    items[:, 5] = np.minimum(items[:, 5], items[:, 4] + run * tiling.block_keys)
    return Work(items.astype(np.int32), np.column_stack([cut[:, 1:4], ends - num_items, num_items]).astype(np.int32))


def _tiles(part: Part, number: int, first_row: int, groups: int, window: int | None, tiling: Tiling) -> np.ndarray:
    """`[T, 6]`: a part's tiles as items over all the keys that some row of the tile may see."""
    positions = part.positions.numpy()
    num_cells = len(positions) * groups
    cells = np.arange(0, num_cells, tiling.block_rows)
    last = positions[(np.minimum(cells + tiling.block_rows, num_cells) - 1) // groups]
    low, high = np.zeros_like(cells), np.full_like(cells, part.num_seen)
    if part.key_positions is None:
        high = np.minimum(last, part.num_seen - 1) + 1
        if window is not None:
            low = np.clip(positions[cells // groups] - window + 1, 0, high)
    shared = [np.full_like(cells, value) for value in (number, first_row)]
    return np.column_stack([*shared, cells, np.full_like(cells, num_cells), low, high])
