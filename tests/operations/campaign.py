"""One pass after the other is begun, disturbed, judged and finished; what it left is compared with a store in peace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from kvfix.cli.app import main
from kvfix.store import Store, VersionRecord
from tests.operations.site import Site, ended, forked, in_process

BETWEEN_GC = 10


class Campaign:
    """The states of a site before and after its last change, and what became of its passes."""

    def __init__(self, site: Site) -> None:
        self.site, self.log = site, site.root / "pass.log"
        self.counts: Counter[str] = Counter()
        self.old: dict[str, VersionRecord] = {}
        self.new: dict[str, VersionRecord] = {}
        self.pass_s = 0.3

    def change(self) -> None:
        """Change the corpus, and learn what the store is to hold for it."""
        author = self.site.author
        author.edit(), author.edit()
        for what in (author.add, author.rename, author.remove):
            if author.chance.random() < 0.2:
                what()
        self.old, self.new = self.new, self.site.learn()
        self.left = set(self.site.store.glob("tmp/*"))

    def begin(self, *options: object, first: Callable[[], object] = lambda: None) -> int:
        """The process of a pass, which calls `first` before it begins."""
        return forked(lambda: (first(), main(self.site.sync(*options)))[1], self.log)

    def judge(self, name: str, code: int, codes: set[int], tidy: bool) -> None:
        """What is there after a pass that ended so."""
        assert code in codes, self.log.read_text()
        self.counts[f"{name}, {'done before' if code == 0 else 'ended'}"] += 1
        self.counts["ended"] += code != 0
        if tidy:
            assert set(self.site.store.glob("tmp/*")) <= self.left
            assert not (self.site.store / "lock.holder").exists()
        self.check_whole()

    def go_on(self) -> None:
        """The next pass works, and finishes what was begun."""
        start = time.perf_counter()
        assert ended(self.begin()) == 0, self.log.read_text()
        self.pass_s = time.perf_counter() - start
        self.check_done()
        if self.counts["ended"] % BETWEEN_GC == 0:
            self.collect()

    def collect(self) -> None:
        assert in_process(["gc", "--store", str(self.site.store), "--min-age", "0s"]) == 0

    def check_whole(self) -> None:
        """No document of both states is lost; each stands in the one or in the other."""
        if not self.old:
            return
        with Store.open(self.site.store, read_only=True) as store:
            heads = {record.doc_id: record for record in store.documents()}
            for name, head in heads.items():
                assert self.site.fault(store.snapshot(head, check=True)) is None
                states = [state[name].text_sha256 for state in (self.old, self.new) if name in state]
                assert head.text_sha256 in states, name
        assert self.old.keys() & self.new.keys() <= heads.keys()
        texts = [head.text_sha256 for head in heads.values()]
        lasting = {r.text_sha256 for r in self.old.values()} & {r.text_sha256 for r in self.new.values()}
        assert [text for text in lasting if texts.count(text) != 1] == []

    def check_done(self) -> None:
        """The store holds what a store holds that nobody disturbed."""
        with Store.open(self.site.store, read_only=True) as store:
            assert {head.doc_id: facts(head) for head in store.documents()} == {
                name: facts(head) for name, head in self.new.items()
            }
            assert store.verify() == []


def facts(record: VersionRecord) -> tuple:
    return record.version, record.text_sha256, record.token_sha256, record.debt
