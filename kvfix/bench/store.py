"""What a store takes: commits, loads, a pass over unchanged files, upkeep - beside what disk and memory allow."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix.bench.ceilings import bandwidths
from kvfix.bench.disk import DiskCeilings, measure_disk
from kvfix.bench.stocked import Stock
from kvfix.bench.store_steps import Step, Steps
from kvfix.bench.texts import versions
from kvfix.core import Notify
from kvfix.errors import UsageError
from kvfix.pipeline.admission import admit
from kvfix.pipeline.measure import ROUNDS, spread

if TYPE_CHECKING:
    from kvfix.engine import Engine

SCHEMA = "kvfix.store/1"
WHOLE_COPIES = 8  # of a cache on the disk at a time, at most


@dataclass(frozen=True)
class StoreOptions:
    """Where, and of what sizes. Raises `UsageError` for values that make no sense."""

    folder: Path  # an existing directory on the disk to measure
    context: int = 1024  # tokens of a document
    num_rows: int = 32  # of a patch
    documents: int = 100  # of the pass over unchanged files
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} is no directory: name a store in one that exists with --store")
        if not 4 < self.num_rows <= self.context // 16:
            raise UsageError(
                f"--k {self.num_rows}: a patch of a document of {self.context} tokens has 5 to {self.context // 16} "
                "rows here, so that eight of them are no larger than half of it"
            )


def run_store(engine: Engine, options: StoreOptions, notify: Notify = lambda line: None) -> dict[str, Any]:
    """The `kvfix.store/1` document: one row a step, in a store of its own below `folder` that is gone afterwards.

    Files are read from memory, where they are because they were just written. Raises `StoreNotWritableError`.
    """
    from kvfix.store import Store
    from kvfix.store.files import need_space, while_writing

    engine.require_fit(options.context)
    need_space(options.folder, WHOLE_COPIES * options.context * engine.row_bytes)
    with while_writing(options.folder):
        folder = Path(tempfile.mkdtemp(prefix=".kvfix-bench-", dir=options.folder.resolve()))
    try:
        with Store.open(folder / "store", create=True) as store:
            admit(engine, store)
            with while_writing(folder):
                notify("storing the documents")
                stock = Stock(engine, store, folder, options.context)
                trial = _Trial(engine, Steps(engine, stock, options.num_rows, options.documents))
                trial.measure_ceilings(folder)
                for number in range(options.rounds + 1):
                    notify(f"round {number} of {options.rounds}")
                    trial.round()
                trial.measure_ceilings(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "schema": SCHEMA,
        "model": engine.describe(),
        "context": options.context,
        "rows_a_patch": options.num_rows,
        "rounds": options.rounds,
        "rows": trial.rows(),
        "ceilings": trial.ceilings._asdict() if trial.ceilings else None,
        "device": str(engine.device),
        "dtype": engine.dtype_name,
        "versions": versions(),
    }


@dataclass
class _Trial:
    """The steps of every round, and what they have taken."""

    engine: Engine
    steps: Steps
    taken: dict[tuple, tuple[Step, list[float]]] = field(default_factory=dict)  # the last of its kind, and all its ms
    ceilings: DiskCeilings | None = None

    def measure_ceilings(self, folder: Path) -> None:
        """Before the rounds and after them; the better of both counts."""
        import torch

        _, copied = bandwidths(self.engine, torch.device("cpu"))
        found = measure_disk(folder, copied)
        self.ceilings = found if self.ceilings is None else found.better(self.ceilings)

    def round(self) -> None:
        """Every step once."""
        for step, ms in self.steps.once():
            _, times = self.taken.get((step.name, step.patches, step.moved), (step, []))
            self.taken[step.name, step.patches, step.moved] = step, [*times, ms]

    def rows(self) -> list[dict[str, Any]]:
        """The first round, a warm-up, left out."""
        return [self._row(step, times[1:]) for step, times in self.taken.values()]

    def _row(self, step: Step, times: list[float]) -> dict[str, Any]:
        assert self.ceilings is not None
        each_ms, num_bytes = spread([ms / step.num_items for ms in times]), step.num_bytes / step.num_items
        bound = self.ceilings.bound(step.bound, step.num_bytes)
        bound["bound_ms"] /= step.num_items
        return {
            "name": step.name,
            "patches": step.patches,
            "moved": step.moved,
            "num_items": step.num_items,
            "data_bytes": num_bytes,
            "each_ms": each_ms,
            "bytes_per_s": num_bytes / each_ms["median"] * 1e3,
            "roofline": {**bound, "share": bound["bound_ms"] / each_ms["median"]},
        }
