"""The attention kernel's work on the device: of one pass, or in room that the passes of a recorded launch share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvfix.ops.packing import Pack
from kvfix.ops.positional_attention.tiles import Tiling, choose_tiling, share_out


class Call(NamedTuple):
    """One kind of call; a model's layers make a few."""

    groups: int  # query heads for each key head
    num_heads: int  # key heads
    window: int | None
    block_value_dim: int


class Plan:
    """The work of one kind of call of a pack; layers share it."""

    def __init__(self, items: torch.Tensor, tiles: torch.Tensor, split: bool, tiling: Tiling, call: Call) -> None:
        self.items, self.tiles, self.split, self.tiling = items, tiles, split, tiling
        num_cells = len(items) * call.num_heads * tiling.block_rows if split else 0
        self.partial = torch.empty(num_cells * (call.block_value_dim + 2), device=items.device)


def plan_of(pack: Pack, call: Call, tiling: Tiling | None) -> Plan:
    """The pack's plan for such calls, made when the first of them comes; `tiling` None: as `choose_tiling` has it."""

    def made() -> Plan:
        chosen, device = tiling or tiling_for(pack, call.groups), pack.parts[0].keys.device
        work = share_out(pack, call.groups, call.num_heads, call.window, chosen)
        sent = torch.from_numpy(work.items).to(device), torch.from_numpy(work.tiles).to(device)
        return Plan(*sent, work.split, chosen, call)

    return pack.keep((call, tiling), made)


def calls_of(pack: Pack) -> list[Call]:
    """The kinds of calls that the kernel has served for a pack."""
    return [key[0] for key, kept in pack.kept.items() if isinstance(kept, Plan)]


def tiling_for(pack: Pack, groups: int) -> Tiling:
    """The tiles that a pack takes by itself."""
    keys, values = pack.parts[0].keys, pack.parts[0].values
    processors = torch.cuda.get_device_properties(keys.device).multi_processor_count if keys.is_cuda else 4
    num_cells = max(len(part.positions) for part in pack.parts) * groups
    return choose_tiling(num_cells, max(keys.shape[3], values.shape[3]), keys.element_size(), processors)


class FixedPlan(Plan):
    """Room for the work of any pack of at most so many rows and parts, always split, so that launches stay the same.

    Items and tiles beyond the pack's own are null: an item without cells reads and writes nothing. Rows beyond the
    pack's own are cells of tiles without items, which is what makes their output 0.
    """

    def __init__(self, call: Call, tiling: Tiling, num_rows: int, num_parts: int, device: torch.device) -> None:
        # a part's last tile may be half empty, and so may that of the rows beyond; see `share_out` for the items
        num_tiles = num_rows * call.groups // tiling.block_rows + num_parts + 1
        num_items = num_tiles + max(1, tiling.num_programs // call.num_heads)
        sizes = (num_items, 6), (num_tiles, 5)
        items, tiles = (torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
        super().__init__(items, tiles, True, tiling, call)
        self.call, self.num_rows = call, num_rows

    def load(self, pack: Pack) -> None:
        """Write the work of a pack over what was there."""
        call = self.call
        work = share_out(pack, call.groups, call.num_heads, call.window, self.tiling)
        tiles = np.concatenate([work.tiles, self._beyond(pack.starts[-1])])
        for room, rows in ((self.items, work.items), (self.tiles, tiles)):
            whole = np.zeros(room.shape, np.int32)
            whole[: len(rows)] = rows
            room.copy_(torch.from_numpy(whole), non_blocking=True)

    def _beyond(self, num_rows: int) -> np.ndarray:
        """`[T, 5]`: tiles of the rows from `num_rows` on, with no item each."""
        end = (self.num_rows - num_rows) * self.call.groups
        cells = np.arange(0, end, self.tiling.block_rows, dtype=np.int32)
        nothing = np.zeros_like(cells)
        return np.column_stack([nothing + num_rows, cells, nothing + end, nothing, nothing])
