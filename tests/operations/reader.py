"""A process that keeps reading a store while others write to it, and writes down what it saw."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvfix.errors import KVFixError, StoreMissingError, UnknownDocumentError
from kvfix.store import Store, VersionRecord
from tests.operations.site import Site, ended, forked

PAUSE_S = 0.1


class Reader:
    """Takes snapshots through one store kept open and through stores opened for each look."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.seen: dict[tuple[bool, str], VersionRecord] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def read(self, stop: Path) -> None:
        with ExitStack() as stack:
            kept = None
            while not stop.exists():
                with contextlib.suppress(StoreMissingError):
                    kept = kept or stack.enter_context(Store.open(self.site.store, read_only=True))
                    self.look(kept, True)
                    with Store.open(self.site.store, read_only=True) as fresh:
                        self.look(fresh, False)
                time.sleep(PAUSE_S)

    def look(self, store: Store, kept: bool) -> None:
        try:
            for head in store.documents():
                self.take(store, head, kept)
        except KVFixError as error:
            self.faults.append(f"{type(error).__name__}: {error.message}")

    def take(self, store: Store, head: VersionRecord, kept: bool) -> None:
        try:
            snapshot = store.snapshot(head, check=True)
        except UnknownDocumentError:
            if store.head(head.corpus, head.doc_id) is not None:
                raise
            return
        self.counts["reads"] += 1
        fault = self.site.fault(snapshot)
        record, last = snapshot.record, self.seen.get((kept, head.doc_id))
        if last is not None and record.version < last.version:
            fault = f"{record.doc_id} went from version {last.version} back to {record.version}"
        self.counts["versions"] += last is None or record.record_id != last.record_id
        self.seen[kept, head.doc_id] = record
        self.faults += [fault] if fault else []


@contextmanager
def readers(site: Site, num: int = 1) -> Iterator[Counter[str]]:
    """Readers beside whatever is done meanwhile; what they counted. Asserts that none saw anything amiss."""
    stop, counts = site.root / "stop", Counter[str]()
    stop.unlink(missing_ok=True)

    def work(result: Path) -> int:
        reader = Reader(site)
        reader.read(stop)
        result.write_text(json.dumps([reader.counts, reader.faults]))
        return 0

    results = [site.root / f"reader{n}.json" for n in range(num)]
    children = [forked(lambda result=result: work(result), result.with_suffix(".log")) for result in results]
    try:
        yield counts
    finally:
        stop.touch()
        codes = [ended(child) for child in children]
    for code, result in zip(codes, results, strict=True):
        assert code == 0, result.with_suffix(".log").read_text()
        found, faults = json.loads(result.read_text())
        assert faults == []
        counts.update(found)
    assert counts["reads"] > 0
