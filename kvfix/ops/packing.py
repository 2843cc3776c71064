"""Rows of several documents in one call: each attends to, and is written into, its own document's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

# beyond every position; a key that stands here is seen by no row
FAR = 2**31 - 1


@dataclass(frozen=True)
class Part:
    """One document's rows in a call."""

    keys: torch.Tensor  # [L, H, capacity, D]
    values: torch.Tensor  # [L, H, capacity, Dv]
    positions: torch.Tensor  # [M] int64 on the CPU, ascending
    num_seen: int  # keys that stand in the first so many slots may be seen
    slots: torch.Tensor | None = None  # [M] int64 on the CPU, ascending: where the rows are written
    key_positions: torch.Tensor | None = None  # [num_seen] int64 on the CPU; None: slot i stands at position i

    @cached_property
    def whole(self) -> bool:
        """Whether the rows are all of a sequence, each at its own place."""
        num_rows, positions = len(self.positions), self.positions
        return (
            self.key_positions is None
            and num_rows == self.num_seen
            and int(positions[0]) == 0
            and int(positions[-1]) == num_rows - 1
        )

    @cached_property
    def run(self) -> slice | None:
        """The slots, where they follow one another."""
        if self.slots is None:
            return None
        first, end = int(self.slots[0]), int(self.slots[-1]) + 1
        return slice(first, end) if end - first == len(self.slots) else None

    def seen(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values that may be seen: `[H, num_seen, D]` views."""
        return self.keys[layer, :, : self.num_seen], self.values[layer, :, : self.num_seen]


class Tables(NamedTuple):
    """What kernels read of a pack, on its device."""

    documents: torch.Tensor  # [parts, 9] int64: see `_document`
    part_of_row: torch.Tensor  # [M] int64
    slots: torch.Tensor  # [M] int64; -1: the row is written nowhere
    positions: torch.Tensor  # [M] int32
    key_positions: torch.Tensor  # int32, one part's after another's; empty: slot i stands at position i
    alignment: int  # elements that divide every base address and stride
    key_step: int  # stride of one dim
    value_step: int


class Pack:
    """The parts of one pass, in the order of its rows; kernels' tables are made once for all layers."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.starts = list(accumulate((len(part.positions) for part in parts), initial=0))
        self.kept: dict[Any, Any] = {}  # what kernels keep from one layer to the next

    def __iter__(self) -> Iterator[tuple[Part, slice]]:
        """Each part and its rows among all."""
        for part, start in zip(self.parts, self.starts, strict=False):
            yield part, slice(start, start + len(part.positions))

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is kept under `key`, made when it is first asked for."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @cached_property
    def host_tables(self) -> Tables:
        """`tables`, still on the CPU. Raises `ValueError` for parts that one kernel cannot serve together."""
        first = self.parts[0]
        for part in self.parts:
            for mine, like in ((part.keys, first.keys), (part.values, first.values)):
                if (mine.dtype, mine.device) != (like.dtype, first.keys.device) or mine.stride(3) != like.stride(3):
                    raise ValueError("keys and values of one call differ in dtype, device or innermost stride")
                if (mine.shape[1], mine.shape[3]) != (like.shape[1], like.shape[3]):
                    raise ValueError("keys and values of one call differ in heads or dims")
        return Tables(
            torch.tensor(self._documents()),
            torch.repeat_interleave(
                torch.arange(len(self.parts)), torch.tensor([len(p.positions) for p in self.parts])
            ),
            torch.cat([torch.full_like(p.positions, -1) if p.slots is None else p.slots for p in self.parts]),
            _near(torch.cat([p.positions for p in self.parts]), FAR - 1),
            self._key_positions(),
            min(_alignment(t) for part in self.parts for t in (part.keys, part.values)),
            first.keys.stride(3),
            first.values.stride(3),
        )

    @cached_property
    def tables(self) -> Tables:
        """Raises `ValueError` for parts that one kernel cannot serve together."""
        made, device = self.host_tables, self.parts[0].keys.device
        wide = made[:3]
        # one transfer for all that is int64
        sent = torch.cat([table.flatten() for table in wide]).to(device).split([table.numel() for table in wide])
        return made._replace(
            documents=sent[0].view_as(made.documents),
            part_of_row=sent[1],
            slots=sent[2],
            positions=made.positions.to(device),
            key_positions=made.key_positions.to(device),
        )

    def _key_positions(self) -> torch.Tensor:
        if all(part.key_positions is None for part in self.parts):
            return torch.empty(0, dtype=torch.int32)
        given = [torch.arange(p.num_seen) if p.key_positions is None else p.key_positions for p in self.parts]
        return _near(torch.cat(given), FAR)

    def _documents(self) -> list[list[int]]:
        """A row a part: addresses of keys and values, their layer, head and row strides, start of its key positions."""
        starts = accumulate((p.num_seen for p in self.parts), initial=0)
        return [
            [p.keys.data_ptr(), p.values.data_ptr(), *p.keys.stride()[:3], *p.values.stride()[:3], start]
            for p, start in zip(self.parts, starts, strict=False)
        ]


def _near(positions: torch.Tensor, most: int) -> torch.Tensor:
    return positions.clamp(max=most).to(torch.int32)


def _alignment(tensor: torch.Tensor) -> int:
    """Elements, at most 16 bytes of them, that divide a tensor's address and strides; 1 where dims are apart."""
    size = tensor.element_size()
    whole = 16 // size
    steps = [stride for stride, length in zip(tensor.stride()[:3], tensor.shape, strict=False) if length > 1]
    even = tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0 and all(step % whole == 0 for step in steps)
    return whole if even else 1
