"""Epic: the first tokens of every block behind the edit (after LegoLink-k of EPIC, arXiv 2410.15332)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector
from kvfix.selectors.blocks import blocks


@dataclass(frozen=True)
class EpicSelector(Selector):
    """The first `per_block` rows of the blocks that begin behind the first span, in order, until B is spent.

    Ours: EPIC cuts prompts into chunks of hundreds of tokens and takes up to 32 of each; Markdown blocks are shorter,
    and 8 rows let the usual budget reach four of them. Rows of later spans are not counted.
    """

    name: ClassVar[str] = "epic"
    per_block: int = 8

    def select(self, context: SelectionContext) -> np.ndarray:
        starts = [context.first_token(block.start) for block in blocks(context.text)]
        end = context.diff.spans[0].new_end
        chosen = np.zeros(len(context.free), bool)
        for start, following in pairwise([*starts, len(chosen)]):
            if start >= end:
                chosen[start : min(following, start + self.per_block)] = True
        return np.flatnonzero(chosen & context.free)[: context.num_rows]
