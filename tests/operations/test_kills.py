"""Passes that are ended at any moment, a reader beside them: every document stays whole, and the next pass goes on.

KVFIX_LONG=1 ends more than two hundred of them, on a disk that really syncs, instead of a handful.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from itertools import product

import pytest

from tests.cli.test_process import COMMAND
from tests.operations.campaign import Campaign
from tests.operations.reader import readers
from tests.operations.site import LONG, ended
from tests.store.test_crash import STEPS, interrupt

AT_STEPS = list(product(STEPS, (False, True), (1, 2, 4, 7) if LONG else (2,)))[:: 1 if LONG else 6]
NUM_MOMENTS, NUM_TERMS, NUM_FIRST, NUM_COMMANDS = (140, 60, 40, 8) if LONG else (2, 1, 1, 0)
TERM = 128 + signal.SIGTERM


def kill(campaign: Campaign, name: str, child: int, after_s: float | None = None) -> None:
    campaign.judge(name, ended(child, after_s), {0, -signal.SIGKILL}, tidy=False)
    campaign.go_on()


def at_step(campaign: Campaign, step: str, after: bool, nth: int) -> None:
    """Have a pass kill itself at the nth time that it comes to a step."""
    campaign.change()
    kill(campaign, step, campaign.begin(first=lambda: interrupt(pytest.MonkeyPatch(), step, after, nth)))


def at_moment(campaign: Campaign) -> None:
    campaign.change()
    kill(campaign, "at some moment", campaign.begin(), campaign.site.author.chance.uniform(0, campaign.pass_s))


def at_term(campaign: Campaign) -> None:
    """Ask a pass to end: it takes its temporary files and the lock with it."""
    campaign.change()
    code = ended(campaign.begin(), campaign.site.author.chance.uniform(0, campaign.pass_s), signal.SIGTERM)
    # one that has not yet begun has nothing to tidy up and dies of the signal itself
    campaign.judge("SIGTERM", code, {0, TERM, -signal.SIGTERM}, tidy=True)
    campaign.go_on()


def at_command(campaign: Campaign) -> None:
    """Kill a real command, whose interpreter takes its time to start."""
    campaign.change()
    with open(campaign.log, "w") as log:
        process = subprocess.Popen([*COMMAND, *campaign.site.sync()], stdout=log, stderr=log)
        time.sleep(campaign.site.author.chance.uniform(1, 12))
        process.kill()
        campaign.judge("kvfix sync", process.wait(), {0, -signal.SIGKILL}, tidy=False)
    campaign.go_on()


def test_ended_passes(site):
    campaign = Campaign(site)
    with readers(site) as read:
        for step in AT_STEPS:
            at_step(campaign, *step)
        for end, times in ((at_moment, NUM_MOMENTS), (at_term, NUM_TERMS), (at_command, NUM_COMMANDS)):
            for _ in range(times):
                end(campaign)
    campaign.collect()
    assert list(site.store.glob("tmp/*")) == []
    campaign.check_done()
    print(dict(sorted(campaign.counts.items())), dict(read))
    assert campaign.counts["ended"] >= (200 if LONG else 4)


def test_a_first_pass_that_is_killed(site):
    """Also while the store is made: what is there is no obstacle to the next pass."""
    campaign = Campaign(site)
    for _ in range(NUM_FIRST):
        at_moment(campaign)
        shutil.rmtree(site.store)
        shutil.rmtree(site.reference)
        campaign.new = {}
    print(dict(campaign.counts))
