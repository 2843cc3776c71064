"""Roofline: the time that counted work takes at the best rates measured here, beside the time that it took.

A pass needs `bound_ms` = max(operations / rate of matrix products, bytes / read bandwidth) at least; `share` = bound /
measured is 1 for a pass that does nothing else, at the best rates. A share above 1 says that the machine was slower
while its ceilings were taken: somebody else used it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.bench.ceilings import Ceilings
from kvfix.bench.counts import Counts, Work

if TYPE_CHECKING:
    from kvfix.engine import Engine


class Roofline:
    """A model's counts, and what this process has shown to be possible so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counts = Counts.of(engine)
        self.ceilings = Ceilings.of(engine, self.counts.weights.linears)

    def measure_again(self) -> None:
        """Keep the better of the ceilings so far and those of now: others may use the machine."""
        self.ceilings = self.ceilings.higher(Ceilings.of(self.engine, self.counts.weights.linears))

    def beside(self, work: Work, measured_ms: float) -> dict[str, Any]:
        """Counts, bound and share of work that took so long."""
        told = bound(work, self.ceilings)
        return {**work._asdict(), **told, "share": told["bound_ms"] / measured_ms}

    def describe(self) -> dict[str, Any]:
        """The ceilings, and what was assumed."""
        weights = self.counts.weights
        experts = f"{weights.num_experts} experts, rows spread evenly" if weights.experts else None
        return {**self.ceilings._asdict(), "assumed": experts}


def bound(work: Work, ceilings: Ceilings) -> dict[str, Any]:
    """`bound_ms` and which of the two it is."""
    compute_ms = work.operations / ceilings.operations_per_s * 1e3
    memory_ms = work.num_bytes / ceilings.read_bytes_per_s * 1e3
    return {"bound_ms": max(compute_ms, memory_ms), "bound_by": "compute" if compute_ms >= memory_ms else "memory"}
