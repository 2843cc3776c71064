"""Carrier: one window at the block that holds the true answer (CarrierWindow of arXiv 2609.17983)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfix.selectors.base import SelectionContext, Selector, windows
from kvfix.selectors.blocks import blocks


@dataclass(frozen=True)
class CarrierSelector(Selector):
    """B rows from the start of the block around the first carrier, or from behind the first span if that is later.

    Where the answer stands nowhere else, the edited block itself bears it (ours): the window begins behind the span.
    A diagnostic; raises `UsageError` without a diagnosis.
    """

    name: ClassVar[str] = "carrier"

    def select(self, context: SelectionContext) -> np.ndarray:
        carriers = context.require_diagnosis(self).carriers()
        start = context.diff.spans[0].new_end
        if carriers:
            character = int(context.offsets[carriers[0] - context.num_prefix][0])
            block = next(block for block in blocks(context.text) if character < block.end)
            start = max(start, context.first_token(block.start))
        return windows(context.free, [start], context.num_rows)
