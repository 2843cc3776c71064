"""Source maps as runs: which rows of the version before were kept, and where they went."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def to_runs(source: np.ndarray) -> np.ndarray:
    """The runs `[R, 3]` (new start, old start, length) of a source map `[N]` whose -1 marks rows not kept."""
    import numpy as np

    new = np.flatnonzero(source >= 0)
    old = source[new]
    starts = np.flatnonzero((np.diff(new, prepend=-2) != 1) | (np.diff(old, prepend=-2) != 1))
    lengths = np.diff(starts, append=len(new))
    return np.stack([new[starts], old[starts], lengths], axis=1).astype(np.int64)


def from_runs(runs: np.ndarray, num_rows: int, num_old: int) -> np.ndarray:
    """The source map `[num_rows]` again; ValueError if a run leaves either version or two overlap."""
    import numpy as np

    source = np.full(num_rows, -1, np.int64)
    if len(runs) == 0:
        return source
    new, old, length = runs.T
    ends = new + length
    if (runs < 0).any() or (length < 1).any() or (new[1:] < ends[:-1]).any():
        raise ValueError("its source map is out of order")
    if ends[-1] > num_rows or (old + length).max() > num_old:
        raise ValueError("its source map leaves the document")
    step = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    source[np.repeat(new, length) + step] = np.repeat(old, length) + step
    return source
