"""Diagnosis: what one row of the fresh cache would change in the stale one's answer. Benchmarks alone can know it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvfix.core import KVCache, TokenDiff
from kvfix.engine.cache import NEVER, Rows
from kvfix.engine.continuations import PASS_ROWS
from kvfix.metrics import margin

if TYPE_CHECKING:
    from kvfix.engine.engine import Engine


class Trial(NamedTuple):
    """A query behind the document and its two answers as token ids; one of the answers may be empty."""

    query_ids: Sequence[int]
    new_ids: Sequence[int]
    old_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.query_ids) + len(self.new_ids) + len(self.old_ids)


class TransplantDiagnosis:
    """The effect of single fresh rows on the margin of a trial (CausalOracle of arXiv 2606.17107 and 2609.17983).

    `stale` is the cache after the spans alone were recomputed, which is what k = 0 gives (ours: what a row is worth
    besides the spans, which every repair recomputes); `fresh` is a prefill of the same tokens. Both are left as they
    are. `carriers` are what `carrier_positions` found.
    """

    def __init__(
        self, engine: Engine, stale: KVCache, fresh: KVCache, trial: Trial, carriers: Sequence[int] = ()
    ) -> None:
        self.engine, self.stale, self.fresh, self.trial = engine, stale, fresh, trial
        self._carriers = list(carriers)
        self._num_tried = max(1, PASS_ROWS // len(trial))  # candidates of one pass

    def carriers(self) -> list[int]:
        """Positions after the edit where the new answer's text begins, ascending."""
        return self._carriers

    @torch.inference_mode()
    def transplant_effects(self, positions: np.ndarray) -> np.ndarray:
        """`[len(positions)]` fp32: the margin with that one row, in all layers, taken from `fresh`, less `stale`'s own.

        Raises `DocumentError` when query and answer do not fit behind the document.
        """
        query, new, old = self.trial
        num_rows, tried = len(self.stale), self._num_tried
        self.engine.require_room(self.stale, len(query) + max(len(new), len(old)))
        # behind the stale rows: one slot a candidate for its fresh row, then their texts side by side
        board = self.engine.new_cache(self.stale.token_ids, tried * (1 + len(self.trial)))
        board.keys[:, :, :num_rows] = self.stale.keys[:, :, :num_rows]
        board.values[:, :, :num_rows] = self.stale.values[:, :, :num_rows]
        margins = [self._margins(board, positions[n : n + tried]) for n in range(0, len(positions), tried)]
        base = self._margins(board, np.array([NEVER]))[0]
        return np.array([one - base for batch in margins for one in batch], np.float32)

    def _margins(self, board: KVCache, positions: np.ndarray) -> list[float]:
        """The margin with each of these rows transplanted, `NEVER` for none, from one pass."""
        at = positions[positions != NEVER]
        slots = slice(len(board), len(board) + len(at))
        board.keys[:, :, slots] = self.fresh.keys[:, :, torch.from_numpy(at)]
        board.values[:, :, slots] = self.fresh.values[:, :, torch.from_numpy(at)]
        query, new, old = self.trial
        groups = [rows for n, position in enumerate(positions) for rows in self._texts(board, n, int(position))]
        last = len(query) - 1
        # an answer's first token is read at the query's last one, which both answers share
        read = np.array(
            [*range(last, last + len(new)), *([last] if old else ()), *range(last + len(new) + 1, len(self.trial) - 1)]
        )
        wanted = (np.arange(len(positions))[:, None] * len(self.trial) + read).ravel()
        logprobs = self.engine.logits(groups, wanted.tolist()).float().log_softmax(-1)
        answers = torch.tensor([*new, *old] * len(positions), device=logprobs.device)
        of_tokens = logprobs.gather(1, answers[:, None]).reshape(len(positions), -1).cpu()
        return [self._margin(row) for row in of_tokens]

    def _margin(self, of_tokens: torch.Tensor) -> float:
        """The margin from the log-probabilities `[new + old]` of both answers' tokens."""
        new, old = of_tokens.tensor_split([len(self.trial.new_ids)])
        return margin(*(float(part.mean()) if len(part) else None for part in (new, old))) or 0.0

    def _texts(self, board: KVCache, index: int, position: int) -> list[Rows]:
        """Candidate `index`'s rows: the query with the new answer, and the old answer behind the same query."""
        num_rows, (query, new, old) = len(board), self.trial
        start = num_rows + self._num_tried + index * len(self.trial)
        seen = np.full(start + len(self.trial), NEVER)
        seen[:num_rows] = np.arange(num_rows)
        if position != NEVER:
            seen[position], seen[num_rows + index] = NEVER, position
        seen[start : start + len(query)] = num_rows + np.arange(len(query))
        behind = start + len(query)
        texts = [_rows(board, seen, start, num_rows, [*query, *new])]
        if old:
            texts.append(_rows(board, seen, behind + len(new), num_rows + len(query), old))
        return texts


def _rows(board: KVCache, seen: np.ndarray, slot: int, position: int, token_ids: Sequence[int]) -> Rows:
    """Rows from `slot` and `position` on that see themselves besides what `seen` `[slots]` shows."""
    slots, positions = (start + np.arange(len(token_ids)) for start in (slot, position))
    own = seen[: slot + len(token_ids)].copy()
    own[slot:] = positions
    return Rows(board, np.asarray(token_ids, np.int64), positions, slots, torch.from_numpy(own))


def carrier_positions(text: str, offsets: np.ndarray, num_prefix: int, diff: TokenDiff, answer: str) -> list[int]:
    """Positions of the tokens behind the first span, and in none, where an answer begins in the edited text, ascending.

    Ours: the answer is stripped and has to stand as a word of its own, so that 30 is not found in 300.
    """
    if not answer.strip():
        return []
    found = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text)]
    rows = num_prefix + np.searchsorted(offsets[:, 1], found, side="right")
    return [row for row in np.unique(rows).tolist() if row >= diff.first and diff.source[row] >= 0]
