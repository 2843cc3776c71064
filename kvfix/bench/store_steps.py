"""What of a store is timed, step by step; each round takes all of them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.bench.stocked import Loaded, Patch, Stock
from kvfix.errors import KVFixError
from kvfix.pipeline.load import load_cache
from kvfix.pipeline.measure import timed_ms

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import VersionRecord

PATCHES = (0, 1, 8)
OUTDATED = 8  # documents of which gc removes the previous version


class Step(NamedTuple):
    """One thing that is timed, and what it moves."""

    name: str
    bound: str  # its kind: see `DiskCeilings.bound`
    num_bytes: int
    patches: int | None = None
    moved: bool | None = None
    num_items: int = 1  # documents or files that time and bytes are divided by


class Steps:
    """A stock with everything that the steps need, and the steps."""

    def __init__(self, engine: Engine, stock: Stock, num_rows: int, num_files: int) -> None:
        """Stores the documents that are loaded, and those that a pass finds unchanged; patches have `num_rows`."""
        self.engine, self.stock, self.num_rows, self.num_files = engine, stock, num_rows, num_files
        cases = [(patches, moved) for patches in PATCHES for moved in (False, True) if patches or not moved]
        allowed = [case for case in cases if engine.rotations is not None or not case[1]]
        self.loaded: Sequence[Loaded] = [stock.patched(patches, num_rows, moved) for patches, moved in allowed]
        stock.with_files(num_files)

    def once(self) -> Iterator[tuple[Step, float]]:
        """Each step and its milliseconds."""
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
        patch = Patch.at(stock.texts.token_ids, len(stock.texts.token_ids) // 3, self.num_rows)
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
        if number != self.num_files:
            raise KVFixError(f"{number} of {self.num_files} documents seem unchanged; no times are reported")
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
