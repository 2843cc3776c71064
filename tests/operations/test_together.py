"""Two passes at once and three readers beside them: one pass writes, and nobody reads a mixture or an error."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kvfix.cli.app import main
from tests.operations.campaign import Campaign
from tests.operations.reader import readers
from tests.operations.site import LONG, ended, forked
from tests.store.test_crash import interrupt

NUM_ROUNDS = 40 if LONG else 2
BUSY_S = 60.0


def wait_for(path: Path) -> None:
    until = time.monotonic() + BUSY_S
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


class Pair:
    """A pass that stops in mid-commit until it may go on, and another one beside it."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign, root = campaign, campaign.site.root
        self.inside, self.go, self.log = root / "inside", root / "go", root / "other.log"
        for path in (self.inside, self.go):
            path.unlink(missing_ok=True)

    def begin(self) -> int:
        """The first pass, once it is inside a commit."""
        child = self.campaign.begin(
            first=lambda: interrupt(pytest.MonkeyPatch(), "transaction open", False, 1, self._stop)
        )
        wait_for(self.inside)
        return child

    def _stop(self) -> None:
        self.inside.touch()
        wait_for(self.go)

    def other(self, lock_timeout_s: float) -> int:
        arguments = self.campaign.site.sync("--json")
        arguments[arguments.index("--lock-timeout") + 1] = str(lock_timeout_s)
        return forked(lambda: main(arguments), self.log)


def test_two_passes_and_three_readers(site):
    campaign = Campaign(site)
    campaign.change()
    campaign.go_on()
    with readers(site, 3) as read:
        for _ in range(NUM_ROUNDS):
            check_second_is_busy(campaign)
            check_second_waits(campaign)
            check_race(campaign)
    print(dict(campaign.counts), dict(read))


def check_second_is_busy(campaign: Campaign) -> None:
    campaign.change()
    pair = Pair(campaign)
    first = pair.begin()
    assert ended(pair.other(0)) == 4
    error = json.loads(pair.log.read_text())["error"]
    assert (error["code"], f"process {first} on" in error["message"]) == ("store_busy", True)
    campaign.check_whole()
    pair.go.touch()
    assert ended(first) == 0, campaign.log.read_text()
    campaign.check_done()
    campaign.counts["busy"] += 1


def check_second_waits(campaign: Campaign) -> None:
    campaign.change()
    pair = Pair(campaign)
    first, second = pair.begin(), pair.other(BUSY_S)
    time.sleep(0.1)
    pair.go.touch()
    assert (ended(first), ended(second)) == (0, 0), pair.log.read_text()
    totals = json.loads(pair.log.read_text().splitlines()[-1])["totals"]
    assert totals["unchanged"] == totals["documents"] > 0
    campaign.check_done()
    campaign.counts["waited"] += 1


def check_race(campaign: Campaign) -> None:
    """Whoever comes first."""
    campaign.change()
    pair = Pair(campaign)
    one, other = campaign.begin(), pair.other(0)
    codes = sorted([ended(one), ended(other)])
    assert codes in ([0, 0], [0, 4]), campaign.log.read_text() + pair.log.read_text()
    campaign.check_done()
    campaign.counts[f"race: {codes}"] += 1
