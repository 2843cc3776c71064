"""One version, opened: its segments mapped, its rows and token ids composed from base and patches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfix import pages
from kvfix.core import RowMap
from kvfix.store import objects, sources, texts
from kvfix.store.damage import DamagedFileError
from kvfix.store.records import Detail, SegmentRef, VersionRecord, token_sha256

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvfix.store.layout import Layout


@dataclass(frozen=True)
class Segment:
    """A stored file's rows, mapped: pages are read when they are touched, and writes do not reach the file."""

    ref: SegmentRef
    keys: torch.Tensor  # [L, H, M, D]
    values: torch.Tensor  # [L, H, M, Dv]

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def kind(self) -> str:
        """`base` or `patch`."""
        return self.ref.kind


@dataclass(frozen=True)
class Snapshot:
    """One version, whole. It stays readable after its files have been removed."""

    record: VersionRecord
    token_ids: np.ndarray  # [N] int64
    rows: RowMap  # into `segments`
    segments: tuple[Segment, ...]  # none for an empty document
    text: str

    def release(self) -> None:
        """Let go of the segments' pages in memory; they are read again when they are touched."""
        for segment in self.segments:
            pages.forget(segment.keys)
            pages.forget(segment.values)


@dataclass(frozen=True)
class State:
    """The part of a version that is composed segment by segment."""

    token_ids: np.ndarray  # [N] int64
    rows: RowMap
    text: str | None


def open_snapshot(layout: Layout, detail: Detail, check: bool) -> Snapshot:
    """Map every segment of a version and compose them.

    Keys and values are read for their checksums only if `check` is set; the small tensors always are.
    FileNotFoundError if a file is gone, DamagedFileError naming the file that is not as it was written.
    """
    opened = [objects.open_segment(layout, segment) for segment in detail.segments]
    state = empty_state(detail.text)
    for number, (segment, tensors) in enumerate(zip(detail.segments, opened, strict=True)):
        path = layout.object(segment.name)
        small = {name: tensor for name, tensor in tensors.items() if name not in ("keys", "values")}
        objects.check_tensors(path, tensors if check else small, segment)
        try:
            state = compose(state, segment, tensors, number)
        except (ValueError, KeyError, IndexError) as error:
            raise DamagedFileError(path, str(error)) from error
    _check_composed(layout, detail.record, state)
    return Snapshot(
        detail.record,
        state.token_ids,
        state.rows,
        tuple(
            Segment(segment, tensors["keys"], tensors["values"])
            for segment, tensors in zip(detail.segments, opened, strict=True)
        ),
        state.text or "",
    )


def empty_state(text: str | None) -> State:
    import numpy as np

    none = np.zeros(0, np.int64)
    return State(none, RowMap.of_base(none), text)


def compose(state: State, segment: SegmentRef, tensors: dict[str, torch.Tensor], number: int) -> State:
    """The state after one more segment; ValueError if the segment does not fit onto it."""
    import numpy as np

    small = {name: tensor.numpy() for name, tensor in tensors.items() if name not in ("keys", "values")}
    num_rows = tensors["keys"].shape[2]
    if segment.num_rows != num_rows or tensors["values"].shape[2] != num_rows:
        raise ValueError(f"it holds {num_rows} rows instead of {segment.num_rows}")
    text = texts.unpack(small["text"].tobytes(), state.text)
    if segment.kind == "base":
        if number or not len(small["token_ids"]) == len(small["origin"]) == num_rows:
            raise ValueError("it is no base of a document")
        return State(small["token_ids"], RowMap.of_base(small["origin"]), text)
    positions, source = small["positions"], _source(small, len(state.token_ids))
    kept = source >= 0
    token_ids = np.full(len(source), -1, np.int64)
    token_ids[kept] = state.token_ids[source[kept]]
    token_ids[positions] = small["token_ids"]
    rows = state.rows.realigned(source).overlaid(positions, number)
    if (rows.segment < 0).any():
        raise ValueError("it leaves rows without a place")
    return State(token_ids, rows, text)


def _source(small: dict[str, np.ndarray], num_old: int) -> np.ndarray:
    """A patch's source map `[N]`, its positions checked."""
    num_rows, positions = int(small["num_rows"][0]), small["positions"]
    covered = int(small["source"][:, 2].sum()) + len(positions)
    if not 0 <= num_rows <= covered:
        raise ValueError(f"it has {covered} rows for {num_rows} places")
    if len(positions) and (positions[0] < 0 or positions[-1] >= num_rows or (positions[1:] <= positions[:-1]).any()):
        raise ValueError("its positions are out of order")
    return sources.from_runs(small["source"], num_rows, num_old)


def _check_composed(layout: Layout, record: VersionRecord, state: State) -> None:
    """Raise DamagedFileError unless tokens and text are those of the record."""
    text = hashlib.sha256((state.text or "").encode()).hexdigest()
    tokens = len(state.token_ids) == record.num_tokens and token_sha256(state.token_ids) == record.token_sha256
    if text != record.text_sha256 or not tokens:
        what = "text bytes" if tokens else "tokens"
        path = layout.record(record.record_id)
        raise DamagedFileError(path, f"the {what} of {record.doc_id} are not those of version {record.version}")
