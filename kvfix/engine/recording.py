"""One recorded pass, with the memory that its kernels read: ids, positions and the tables of its rows' documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvfix.engine.attention import Pass
from kvfix.engine.cache import Rows
from kvfix.ops import packed_attention
from kvfix.ops.fixed_pack import FixedPack, Kind, fill
from kvfix.ops.positional_attention.plans import Call

if TYPE_CHECKING:
    from kvfix.engine.engine import Engine


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None: ...


Record = Callable[[Callable[[], object]], Graph]


class FixedPass(Pass):
    """A pass over the rows loaded last, in a bucket: the rows beyond them are token 0 at position 0."""

    # PyTorch's code would read the documents of the recording for ever
    backend = "triton"
    attend = staticmethod(partial(packed_attention, backend="triton"))

    def __init__(self, pack: FixedPack, device: torch.device) -> None:
        super().__init__([])
        self.pack = self.fixed = pack
        self.ids, self.positions = (
            torch.zeros(1, pack.kind.num_rows, dtype=torch.int64, device=device) for _ in range(2)
        )

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.positions

    def load(self, this: Pass) -> None:
        """Take the rows of another pass, in the order of the current stream."""
        self.fixed.load(this.pack)
        for room, given in zip((self.ids, self.positions), this.inputs(torch.device("cpu")), strict=True):
            fill(room[0], given[0], 0)


class Recording:
    """A recorded pass of one kind."""

    def __init__(self, engine: Engine, kind: Kind, calls: list[Call], record: Record) -> None:
        # another text than is replayed first: what a recording keeps of it shows
        num_rows = min(kind.num_rows, engine.positions.max_tokens or kind.num_rows)
        text = engine.new_cache(np.zeros(num_rows, np.int64))
        recorded = Pass([Rows.at(text, np.arange(len(text)))])
        self.rows = FixedPass(FixedPack(kind, recorded.pack.parts[0], calls), engine.device)
        self.rows.load(recorded)
        self.graph = record(partial(engine.run_pass, self.rows, ends=engine.shape.layers - 1))

    def replay(self, this: Pass) -> None:
        """Compute the rows of a pass, in place."""
        self.rows.load(this)
        self.graph.replay()


def rows_of(this: Pass) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of the keys and values `[L, H, M, D]` of a pass's rows, a document after another."""
    return [(rows.cache.keys[:, :, rows.slots], rows.cache.values[:, :, rows.slots]) for rows in this.groups]


def write_rows(this: Pass, given: list[tuple[torch.Tensor, torch.Tensor]] | float) -> None:
    """Put such copies back, or one number everywhere."""
    for number, rows in enumerate(this.groups):
        keys, values = (given, given) if isinstance(given, float) else given[number]
        rows.cache.keys[:, :, rows.slots] = keys
        rows.cache.values[:, :, rows.slots] = values


def farthest_apart(
    one: list[tuple[torch.Tensor, torch.Tensor]], other: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """The root mean square difference of the worst row of a layer, relative to that of the layer's rows; NaN stays."""
    worst = []
    for mine, theirs in zip(sum(one, ()), sum(other, ()), strict=True):
        mine, theirs = mine.float(), theirs.float()
        size = theirs.square().mean((1, 2, 3)).sqrt()  # [L]
        rows = (mine - theirs).square().mean((1, 3)).sqrt()  # [L, M]
        worst.append((rows / size[:, None].clamp(min=1e-30)).max())
    return float(torch.stack(worst).max())
