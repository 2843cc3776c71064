"""Passes that are ended at any moment, with a reader beside them: every document stays whole, and the next pass goes on.

KVFIX_LONG=1 ends more than two hundred of them, on a disk that really syncs, instead of a dozen.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections import Counter
from itertools import product

import pytest

from kvfix.cli.app import main
from kvfix.store import Store, VersionRecord
from tests.cli.test_process import COMMAND
from tests.operations.reader import readers
from tests.operations.site import LONG, Site, ended, forked, in_process
from tests.store.test_crash import STEPS, interrupt

AT_STEPS = list(product(STEPS, (False, True), (1, 2, 4, 7) if LONG else (2,)))[:: 1 if LONG else 6]
NUM_MOMENTS, NUM_TERMS, NUM_FIRST, NUM_COMMANDS = (140, 60, 40, 8) if LONG else (2, 1, 1, 0)
BETWEEN_GC = 10


class Campaign:
    """One pass after the other is begun, ended, judged and finished."""

    def __init__(self, site: Site) -> None:
        self.site, self.log = site, site.root / "pass.log"
        self.counts: Counter[str] = Counter()
        self.old: dict[str, VersionRecord] = {}
        self.new: dict[str, VersionRecord] = {}
        self.pass_s = 0.3

    def at_step(self, step: str, after: bool, nth: int) -> None:
        """Have a pass kill itself at the nth time that it comes to a step."""

        def work() -> int:
            interrupt(pytest.MonkeyPatch(), step, after, nth)
            return main(self.site.sync())

        self.change()
        self.judge(step, ended(forked(work, self.log)))

    def at_moment(self, number: signal.Signals) -> None:
        """Send a pass a signal at some moment."""
        self.change()
        child = forked(lambda: main(self.site.sync()), self.log)
        self.judge(number.name, ended(child, self.site.author.chance.uniform(0, self.pass_s), number))

    def at_command(self) -> None:
        """The same with a real command, whose interpreter takes its time to start."""
        self.change()
        with open(self.log, "w") as log:
            process = subprocess.Popen([*COMMAND, *self.site.sync()], stdout=log, stderr=log)
            time.sleep(self.site.author.chance.uniform(1, 12))
            process.kill()
            self.judge("kvfix sync", process.wait())

    def change(self) -> None:
        """Change the corpus, and learn what the store is to hold for it."""
        author = self.site.author
        author.edit(), author.edit()
        for what in (author.add, author.rename, author.remove):
            if author.chance.random() < 0.2:
                what()
        self.old, self.new = self.new, self.site.learn()
        self.left = set(self.site.store.glob("tmp/*"))

    def judge(self, name: str, code: int) -> None:
        """What is there after a pass that ended so, and whether the next one finishes it."""
        said = self.log.read_text()
        assert code in (0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM), said
        self.counts["kills"] += code != 0
        self.counts[f"{name}, {'done before' if code == 0 else 'ended'}"] += 1
        if code == 128 + signal.SIGTERM:
            assert set(self.site.store.glob("tmp/*")) <= self.left
            assert not (self.site.store / "lock.holder").exists()
        self.check_whole()
        start = time.perf_counter()
        again = ended(forked(lambda: main(self.site.sync()), self.log))
        assert again == 0, self.log.read_text()
        self.pass_s = time.perf_counter() - start
        self.check_done()
        if self.counts["kills"] % BETWEEN_GC == 0:
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
        """The store holds what a store without any kill holds."""
        with Store.open(self.site.store, read_only=True) as store:
            assert {head.doc_id: facts(head) for head in store.documents()} == {
                name: facts(head) for name, head in self.new.items()
            }
            assert store.verify() == []


def facts(record: VersionRecord) -> tuple:
    return record.version, record.text_sha256, record.token_sha256, record.debt


def test_killed_passes(site):
    campaign = Campaign(site)
    with readers(site) as read:
        for step in AT_STEPS:
            campaign.at_step(*step)
        for _ in range(NUM_MOMENTS):
            campaign.at_moment(signal.SIGKILL)
        for _ in range(NUM_TERMS):
            campaign.at_moment(signal.SIGTERM)
        for _ in range(NUM_COMMANDS):
            campaign.at_command()
    assert in_process(["gc", "--store", str(site.store), "--min-age", "0s"]) == 0
    assert list(site.store.glob("tmp/*")) == []
    campaign.check_done()
    print(dict(sorted(campaign.counts.items())), dict(read))
    assert campaign.counts["kills"] >= (200 if LONG else 4)


def test_a_first_pass_that_is_killed(site):
    """Also while the store is made: what is there is no obstacle to the next pass."""
    campaign = Campaign(site)
    for _ in range(NUM_FIRST):
        campaign.at_moment(signal.SIGKILL)
        shutil.rmtree(site.store)
        shutil.rmtree(site.reference)
        campaign.new = {}
    print(dict(campaign.counts))
