"""What a store takes: commits, loads, a pass over unchanged files, upkeep - beside what disk and memory allow."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.bench.ceilings import bandwidths
from kvfix.bench.disk import DiskCeilings, measure_disk
from kvfix.bench.stocked import Loaded, Patch, Stock
from kvfix.bench.texts import versions
from kvfix.core import Notify
from kvfix.errors import KVFixError, UsageError
from kvfix.pipeline.admission import admit
from kvfix.pipeline.load import load_cache
from kvfix.pipeline.measure import ROUNDS, spread, timed_ms

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import VersionRecord

SCHEMA = "kvfix.store/1"
PATCHES = (0, 1, 8)
OUTDATED = 8  # documents of which gc removes the previous version
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


class Step(NamedTuple):
    """One thing that is timed, and what it moves."""

    name: str
    bound: str  # its kind: see `DiskCeilings.bound`
    num_bytes: int
    patches: int | None = None
    moved: bool | None = None
    num_items: int = 1  # documents or files that time and bytes are divided by


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
                trial = _Trial(engine, Stock(engine, store, folder, options.context), options)
                trial.prepare(notify)
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
    stock: Stock
    options: StoreOptions
    steps: dict[tuple, tuple[Step, list[float]]] = field(default_factory=dict)  # the last of its kind, and all its ms
    loaded: list[Loaded] = field(default_factory=list)
    ceilings: DiskCeilings | None = None

    def prepare(self, notify: Notify) -> None:
        """The documents that are loaded, and those that a pass finds unchanged; not timed."""
        notify("storing the documents")
        num_rows, movable = self.options.num_rows, self.engine.rotations is not None
        cases = [(patches, moved) for patches in PATCHES for moved in (False, True) if patches or not moved]
        self.loaded = [self.stock.patched(patches, num_rows, moved) for patches, moved in cases if movable or not moved]
        self.stock.with_files(self.options.documents)

    def measure_ceilings(self, folder: Path) -> None:
        """Before the rounds and after them; the better of both counts."""
        import torch

        _, copied = bandwidths(self.engine, torch.device("cpu"))
        found = measure_disk(folder, copied)
        self.ceilings = found if self.ceilings is None else found.better(self.ceilings)

    def round(self) -> None:
        """Every step once."""
        for step, ms in self._steps():
            _, times = self.steps.get((step.name, step.patches, step.moved), (step, []))
            self.steps[step.name, step.patches, step.moved] = step, [*times, ms]

    def rows(self) -> list[dict[str, Any]]:
        """The first round, a warm-up, left out."""
        return [self._row(step, times[1:]) for step, times in self.steps.values()]

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

    # ---- the steps

    def _steps(self) -> Iterator[tuple[Step, float]]:
        yield from self._commits()
        for version in self.loaded:
            yield self._load(version)
        yield self._sync()
        yield self._verify()
        yield self._gc()

    def _commits(self) -> Iterator[tuple[Step, float]]:
        """A base, and a patch on it."""
        stock = self.stock
        made: list[VersionRecord] = []
        patch = Patch.at(stock.texts.token_ids, self.options.context // 3, self.options.num_rows)
        ms = self._timed(lambda: made.append(stock.commit_base(stock.document("commit.md"))))
        yield Step("commit base", "commit", made[0].written_bytes), ms
        ms = self._timed(lambda: made.append(stock.commit_patch(made[0], patch)))
        yield Step("commit patch", "commit", made[1].written_bytes), ms

    def _load(self, version: Loaded) -> tuple[Step, float]:
        """A stored version as a cache on the engine's device."""
        record, store = version.record, self.stock.store
        ms = self._timed(lambda: load_cache(self.engine, store.snapshot(record), 0))
        moved = version.moved if version.patches else None
        return Step("load", "load", record.num_tokens * record.row_bytes, version.patches, moved), ms

    def _sync(self) -> tuple[Step, float]:
        """A pass over files that have not changed; no model is needed. Raises `KVFixError` if they seem to have."""
        from kvfix.pipeline.changes import Walk, source_at
        from kvfix.pipeline.sync import SyncOptions, sync

        store, files, outcomes = self.stock.store, self.stock.files, list[str]()

        def run() -> None:
            walk = Walk()
            done = sync(lambda: self.engine, store, [source_at(files, store, walk, False)], SyncOptions(), walk)
            outcomes.extend(one.outcome for one in done)

        ms = self._timed(run)
        number = outcomes.count("unchanged")
        if number != self.options.documents:
            raise KVFixError(f"{number} of {self.options.documents} documents seem unchanged; no times are reported")
        num_bytes = number * len(self.stock.texts.text.encode())
        return Step("sync unchanged", "check", num_bytes, num_items=number), ms

    def _verify(self) -> tuple[Step, float]:
        """Every byte of the store. Raises `KVFixError` if it finds damage."""
        store, damages = self.stock.store, list[Any]()
        num_bytes = store.stored_bytes()
        ms = self._timed(lambda: damages.extend(store.verify()))
        if damages:
            raise KVFixError(f"the store is damaged: {damages[0].what}; no times are reported")
        return Step("verify", "check", num_bytes), ms

    def _gc(self) -> tuple[Step, float]:
        """Previous versions removed, of a few documents."""
        from kvfix.store import Store

        self.stock.outdated(OUTDATED)
        reports = list[Any]()
        with Store.open(self.stock.store.path, keep=0) as store:
            ms = self._timed(lambda: reports.append(store.gc(0.0)))
        return Step("gc", "transaction", reports[0].bytes, num_items=reports[0].num_files), ms

    def _timed(self, work: Callable[[], object]) -> float:
        return timed_ms(self.engine, work)
