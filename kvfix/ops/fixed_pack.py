"""A pack whose tables keep their place on the device, so that recorded launches serve other documents later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvfix.ops.packing import Pack, Part, Tables
from kvfix.ops.positional_attention.plans import Call, FixedPlan, tiling_for
from kvfix.ops.positional_attention.tiles import Tiling


class Kind(NamedTuple):
    """What recorded launches hold for; packs of one kind may follow one another in a `FixedPack`."""

    num_rows: int  # at most
    tiling: Tiling
    alignment: int
    key_step: int
    value_step: int

    @classmethod
    def of(cls, pack: Pack, num_rows: int, groups: int) -> Kind:
        """Of a pack whose calls have `groups` query heads for each key head, in room for `num_rows` rows."""
        return cls(num_rows, tiling_for(pack, groups), *pack.host_tables[-3:])

    @property
    def num_parts(self) -> int:
        """At most: documents of few rows are not what room is kept for."""
        return max(4, self.num_rows // 16)

    def takes(self, pack: Pack) -> bool:
        """Whether there is room for a pack of this kind."""
        return len(pack.parts) <= self.num_parts and pack.starts[-1] <= self.num_rows


class FixedPack(Pack):
    """Room on the device for any pack of one kind: the ops' kernels launched with it serve the pack loaded last.

    Rows beyond the loaded ones are written nowhere, see nothing, and their attention output is 0. It holds none of
    the documents' tensors: whoever replays a launch keeps them. PyTorch's code cannot serve it.
    """

    def __init__(self, kind: Kind, like: Part, calls: list[Call]) -> None:
        super().__init__([_without_rows(like)])
        device = like.keys.device
        self.kind = kind
        part_of_row, slots = (torch.zeros(kind.num_rows, dtype=torch.int64, device=device) for _ in range(2))
        self.tables = Tables(
            torch.zeros(kind.num_parts, 9, dtype=torch.int64, device=device),
            part_of_row,
            slots,
            torch.zeros(kind.num_rows, dtype=torch.int32, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
            kind.alignment,
            kind.key_step,
            kind.value_step,
        )
        for call in calls:
            self.kept[call, None] = FixedPlan(call, kind.tiling, kind.num_rows, kind.num_parts, device)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Raises `ValueError` for what there is no room for: it would hold for the pack loaded now and for no other."""
        if key not in self.kept:
            raise ValueError(f"recorded launches were made without {key}")
        return self.kept[key]

    def load(self, pack: Pack) -> None:
        """Write a pack's tables over what was there, in the order of the current stream."""
        given = pack.host_tables
        fill(self.tables.documents, given.documents, 0)
        fill(self.tables.part_of_row, given.part_of_row, 0)
        fill(self.tables.slots, given.slots, -1)
        fill(self.tables.positions, given.positions, 0)
        for plan in self.kept.values():
            plan.load(pack)


def fill(room: torch.Tensor, given: torch.Tensor, beyond: int) -> None:
    """Write `given` (CPU) at the start of `room`, and `beyond` behind it, in one transfer that nothing waits for."""
    whole = torch.full(room.shape, beyond, dtype=room.dtype)
    whole[: len(given)] = given
    # from memory that is not pinned the driver takes a copy before it returns
    room.copy_(whole, non_blocking=True)


def _without_rows(part: Part) -> Part:
    """A part that tells layers, heads, dims and dtype."""
    keys, values = (t.new_empty(*t.shape[:2], 0, t.shape[3]) for t in (part.keys, part.values))
    return Part(keys, values, torch.empty(0, dtype=torch.int64), 0)
