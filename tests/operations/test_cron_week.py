"""A week of cron: passes over a corpus that changes all the time, some of them killed, and what is left of it.

KVFIX_LONG=1 makes five hundred passes instead of twenty.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter
from pathlib import Path

import numpy as np

from kvfix.cli.app import main
from kvfix.engine import Engine
from kvfix.engine.gate import deviation
from kvfix.pipeline.admission import admit
from kvfix.pipeline.load import load_cache
from kvfix.store import Store, garbage
from tests.operations.site import LONG, Author, Site, ended, forked, in_process
from tests.tolerances import CACHE

NUM_PASSES = 500 if LONG else 20
CHANGES = {Author.edit: 0.8, Author.add: 0.1, Author.rename: 0.1, Author.remove: 0.15, Author.restore: 0.15}
NIGHTLY = [("refresh", "--max", "2"), ("compact",), ("gc", "--min-age", "0s")]
MOST_PAGES = 8


class Week:
    """Passes one after the other, as cron begins them."""

    def __init__(self, site: Site) -> None:
        self.site, self.author, self.chance = site, site.author, site.author.chance
        self.counts: Counter[str] = Counter()

    def change(self) -> None:
        for what, share in CHANGES.items():
            if self.chance.random() < share and not (what is Author.add and len(self.author.names) >= MOST_PAGES):
                what(self.author)

    def run(self, arguments: list[str], killed: float) -> None:
        """A verb in this process, or in one that is killed at some moment."""
        log = self.site.root / "verb.log"
        if self.chance.random() < killed:
            code = ended(forked(lambda: main(arguments), log), self.chance.uniform(0, 0.3))
        else:
            code = in_process([*arguments, "--lock-timeout", "0"])
        assert code in (0, -signal.SIGKILL), log.read_text()
        self.counts[f"{arguments[0]}, {'killed' if code else 'done'}"] += 1

    def upkeep(self, verb: str, *options: str) -> None:
        modelled = ["--model", self.site.model] if verb == "refresh" else []
        self.run([verb, "--store", str(self.site.store), *options, *modelled], killed=0.3)


def test_a_week(site, capfd):
    week = Week(site)
    for number in range(NUM_PASSES):
        week.change()
        # documents are pruned at once: a restored one is new again, unless it has a twin
        week.run(site.sync("--verify-sample", 0.2), killed=0.15)
        if number % 7 == 6:
            week.upkeep(*week.chance.choice(NIGHTLY))
    week.run(site.sync(), killed=0.0)
    check_files(site)
    check_debt(site)
    capfd.readouterr()
    common = ["--store", str(site.store), "--model", site.model, "--json"]
    assert main(["verify", "--deep", "--sample", "1000", *common]) == 0
    body = json.loads(capfd.readouterr().out)
    assert (body["ok"], len(body["deep"])) == (True, len(site.author.names))
    print(dict(sorted(week.counts.items())))


def check_files(site: Site) -> None:
    """The store holds the files' texts, and after a gc nothing else."""
    assert in_process(["gc", "--store", str(site.store), "--min-age", "0s"]) == 0
    with Store.open(site.store, read_only=True) as store:
        texts = {head.doc_id: head.text_sha256 for head in store.documents()}
        assert garbage.unreferenced(store._layout, store._manifest) == []
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in site.corpus.iterdir()}
    assert texts == files
    assert list(site.store.glob("tmp/*")) == []
    assert not (site.store / "lock.holder").exists()


def check_debt(site: Site) -> None:
    """Every cache is as near to a fresh one as its debt says."""
    engine = Engine.open(site.model)
    with Store.open(site.store, read_only=True) as store:
        for head in store.documents():
            admit(engine, store)
            cache = load_cache(engine, store.snapshot(head, check=True), 0)
            ids = engine.encode(Path(head.corpus, head.doc_id).read_text()).token_ids
            assert np.array_equal(cache.token_ids, ids)
            fresh = engine.prefill(ids)
            until = head.exact_until
            assert not until or deviation(cache, fresh, slice(0, until)) <= CACHE, head
            assert (until == len(ids)) == (head.state == "exact")
