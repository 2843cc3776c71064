"""The types that all parts share: documents, model keys, caches, diffs, plans and row maps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch

FORMAT_VERSION = 1

# recovers what the rows right behind an edit do, and what follows from it further on: examples/selector_study
DEFAULT_SELECTOR = "linked"
ADAPTIVE = "adaptive"  # instead of k: as many rows a span as the edit calls for

# told what is going on, for whoever shows it
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Document:
    """One text: `corpus` is the absolute path of its directory, `doc_id` the POSIX path below it."""

    corpus: str
    doc_id: str
    text: str
    sha256: str  # of the UTF-8 bytes of `text`


@dataclass(frozen=True)
class ModelKey:
    """What stored keys and values are valid for. Every field but `name` is compared."""

    name: str
    weights: str
    config: str
    adapter: str
    tokenizer: str
    dtype: str
    rope: str
    prefix: tuple[int, ...]  # token ids that stand before every document
    template: str
    format_version: int = FORMAT_VERSION

    def compared(self) -> dict[str, object]:
        """The fields that decide, JSON-ready."""
        fields = asdict(self)
        fields.pop("name")
        fields["prefix"] = list(self.prefix)
        return fields

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name this key."""
        text = json.dumps(self.compared(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: ModelKey) -> list[str]:
        """The names of the compared fields in which two keys differ."""
        mine, theirs = self.compared(), other.compared()
        return [name for name in mine if mine[name] != theirs[name]]

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, **self.compared()}

    @classmethod
    def from_json(cls, fields: dict) -> ModelKey:
        return cls(**{**fields, "prefix": tuple(fields["prefix"])})


@dataclass
class KVCache:
    """One document's keys and values, every row at its own position, with room for a query behind them.

    `origin[i]` is the position key row i was computed at: i itself, except in a cache gathered without
    rotation in order to be stored.
    """

    keys: torch.Tensor  # [L, H, capacity, D], post-RoPE
    values: torch.Tensor  # [L, H, capacity, D]
    token_ids: np.ndarray  # [N] int64
    origin: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers, keys and values."""
        layers, heads, _, dim = self.keys.shape
        value_dim = self.values.shape[-1]
        return layers * heads * (dim + value_dim) * self.keys.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's N rows: keys and values `[H, N, D]`."""
        return self.keys[index, :, : len(self)], self.values[index, :, : len(self)]

    def ready(self, layer: int) -> None:
        """Told before a pass writes or sees the rows of a layer."""

    def written(self, layer: int) -> None:
        """Told when the rows that a pass computes stand in a layer."""


@dataclass(frozen=True)
class EditSpan:
    """Old tokens `[old_start, old_end)` became new tokens `[new_start, new_end)`; either side may be empty."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int

    @property
    def num_old(self) -> int:
        return self.old_end - self.old_start

    @property
    def num_new(self) -> int:
        return self.new_end - self.new_start


@dataclass(frozen=True)
class TokenDiff:
    """How an old token sequence became a new one."""

    spans: tuple[EditSpan, ...]  # in order, disjoint
    num_old: int
    source: np.ndarray  # [N_new] int64: the old row of each kept token, -1 inside spans

    @property
    def num_new(self) -> int:
        return len(self.source)

    @property
    def num_span(self) -> int:
        """New tokens inside spans: the rows every repair recomputes."""
        return sum(span.num_new for span in self.spans)

    @property
    def num_changed(self) -> int:
        """Tokens in spans, of the longer side of each."""
        return sum(max(span.num_old, span.num_new) for span in self.spans)

    @property
    def length_preserving(self) -> bool:
        return all(span.num_old == span.num_new for span in self.spans)

    def stale_source(self) -> np.ndarray:
        """`[N_new]` int64: the old row that stands at each place before anything is repaired.

        In a span that keeps its length, the old token's row; -1 only in spans of another length.
        """
        import numpy as np

        source = self.source.copy()
        for span in self.spans:
            if span.num_old == span.num_new:
                source[span.new_start : span.new_end] = np.arange(span.old_start, span.old_end)
        return source

    @property
    def first(self) -> int:
        """The first new position that the edit touches (N_new when there is none)."""
        return self.spans[0].new_start if self.spans else self.num_new


class Run(NamedTuple):
    """Consecutive rows that come from consecutive rows of one segment and move by one delta."""

    start: int  # in the present order
    end: int
    segment: int  # -1: stored nowhere
    row: int  # the segment's row of `start`
    delta: int  # positions the keys have to move by


@dataclass(frozen=True)
class RowMap:
    """Where each row of a cache is stored.

    Row i is row `row[i]` of segment `segment[i]`, and its key was computed at position `origin[i]`. A row that
    is stored nowhere (it has to be recomputed) has segment -1.
    """

    segment: np.ndarray  # [N] int32
    row: np.ndarray  # [N] int64
    origin: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.segment)

    @classmethod
    def of_base(cls, origin: np.ndarray) -> RowMap:
        """The map of a base segment (segment 0) whose rows stand in order."""
        import numpy as np

        num_rows = len(origin)
        return cls(np.zeros(num_rows, np.int32), np.arange(num_rows), np.asarray(origin, np.int64))

    def runs(self, start: int = 0, end: int | None = None) -> Iterator[Run]:
        """The runs of the rows `[start, end)`, in order."""
        import numpy as np

        end = len(self) if end is None else end
        if start >= end:
            return
        segment, row = self.segment[start:end], self.row[start:end]
        delta = np.arange(start, end) - self.origin[start:end]
        breaks = (np.diff(segment) != 0) | (np.diff(delta) != 0) | ((np.diff(row) != 1) & (segment[1:] >= 0))
        edges = np.concatenate([[0], np.flatnonzero(breaks) + 1, [end - start]]).tolist()
        for low, high in pairwise(edges):
            yield Run(start + low, start + high, int(segment[low]), int(row[low]), int(delta[low]))

    def realigned(self, source: np.ndarray) -> RowMap:
        """The map after an edit: new row i was old row `source[i]`, or is new where that is -1."""
        import numpy as np

        kept = source >= 0
        segment = np.full(len(source), -1, np.int32)
        row, origin = np.zeros(len(source), np.int64), np.arange(len(source))
        segment[kept] = self.segment[source[kept]]
        row[kept] = self.row[source[kept]]
        origin[kept] = self.origin[source[kept]]
        return RowMap(segment, row, origin)

    def overlaid(self, positions: np.ndarray, segment: int) -> RowMap:
        """The map after the rows at `positions` (ascending) were computed anew into segment number `segment`."""
        import numpy as np

        segments, row, origin = self.segment.copy(), self.row.copy(), self.origin.copy()
        segments[positions] = segment
        row[positions] = np.arange(len(positions))
        origin[positions] = positions
        return RowMap(segments, row, origin)


@dataclass(frozen=True)
class LayerRotation:
    """How one layer's keys turn with position: one angle a token for each pair of the first 2·len dims of a head."""

    inv_freq: tuple[float, ...]  # empty: this layer knows no positions
    interleaved: bool = False  # pairs (0, 1), (2, 3), … instead of (0, d/2), (1, d/2 + 1), …


@dataclass(frozen=True)
class RepairPlan:
    """What a repair will recompute, before it is done."""

    diff: TokenDiff
    positions: np.ndarray  # [M] ascending: spans and selected rows
    selector: str
    k: int
    strategy: str = "repair"  # "repair", "suffix" or "full"
    reason: str | None = None  # why the strategy is not the one asked for

    def token_layers(self, num_layers: int) -> int:
        return len(self.positions) * num_layers

    def source(self) -> np.ndarray:
        """`[N]` int64: the old row of each row that is kept, -1 where it is recomputed."""
        source = self.diff.source.copy()
        source[self.positions] = -1
        return source


@dataclass(frozen=True)
class Debt:
    """How far a version is from a fresh prefill."""

    exact_until: int  # rows [0, exact_until) equal a fresh prefill's
    num_tokens: int
    behind: tuple[tuple[int, int], ...] = field(default=())  # runs (edits behind, number of rows), all rows in order

    @property
    def stale_rows(self) -> int:
        return self.num_tokens - self.exact_until

    @property
    def edits_behind(self) -> int:
        return max((edits for edits, _ in self.behind), default=0)

    @property
    def state(self) -> str:
        return "exact" if self.stale_rows == 0 else "repaired"
