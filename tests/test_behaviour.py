"""What kvfix is for, on the demo model: after a repair, the cache tells the new text."""

import pytest

from kvfix.debt import fresh
from kvfix.engine.gate import deviation
from tests.pipeline.desk import Desk, equal
from tests.tolerances import CACHE, MR_HIGH, MR_LOW

POLICY = """# Returns and repairs

This page is for everyone who works at the counter of the Ferrow Street shop. It says what we take back, what we mend,
and who decides. Please read it once a year and sign the list in the office.

## Returns

Customers may return unused goods within 30 days of purchase. They must bring the receipt, and the box has to be whole.
Money goes back to the card it came from; cash is paid out up to 100 crowns. Opened packets of seed and cut cloth are
not taken back, whatever the reason.

If the receipt is lost, the clerk looks the sale up in the till. A sale that cannot be found is not refunded, but the
customer may choose other goods of the same price.

## Repairs

The workshop opens at nine. Small repairs are done while the customer waits, and cost 15 crowns. Larger ones go to the
bench at the back, where Ingrid writes a slip with the date and the price. A lamp is mended for 40 crowns, a clock for
65, and a radio for whatever the parts cost. Nothing is mended that is older than the shop itself.

The person responsible for the workshop is Tomas Lind. He decides whether a thing can be mended, and he answers for what
has been lost. Complaints go to him first, then to the manager, and never to the newspaper.

## Deliveries

Parcels leave on Tuesday and Friday. A parcel to the islands takes four days longer, because the boat sails once a week.
The driver carries no money. Whoever sends a parcel writes the weight on the label, in kilograms, and signs beside it.
"""

# edits of one span, and whether they keep the number of tokens
EDITS = {
    "same length": ("within 30 days", "within 45 days", True),
    "a few tokens more": ("The workshop opens at nine.", "The workshop opens at half past eleven.", False),
    "a name": ("Tomas Lind", "Margaret Oakes-Whitby", False),
}


@pytest.fixture(scope="module")
def desk(demo_engine, tmp_path_factory):
    made = Desk(tmp_path_factory.mktemp("behaviour"), demo_engine)
    made.build(POLICY)
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def restore(desk):
    """Bring the policy's cache back without a prefill."""
    cache, document = desk.loaded(), desk.document(POLICY)
    return lambda: desk.store.commit_base(document, desk.engine.key, cache, fresh(len(cache)), {}, desk.head())


def test_the_gate_passes(demo_engine):
    report = demo_engine.gate_report
    assert all(value <= CACHE for value in report["figures"].values())
    assert report["rotation"]["movable"]
    assert len(report["rotation"]["sets"]) == 1


@pytest.mark.parametrize("kind", EDITS)
def test_a_repair_recovers_the_answer(desk, restore, kind):
    old, new, same_length = EDITS[kind]
    assert POLICY.count(old) == 1
    restore()
    before = desk.loaded()
    report = desk.edit(POLICY.replace(old, new))
    found = report.to_json()
    assert found["outcome"] == "repaired"
    assert found["length_preserving"] is same_length
    assert found["tokens"]["recomputed"] == found["tokens"]["span"] + 32 < found["tokens"]["new"] / 5
    (probe,) = report.quality.probes
    assert probe.margin_stale < 0 < probe.margin_fresh, "the stale cache tells the old text, a fresh one the new"
    assert probe.prefers_new
    assert MR_LOW <= probe.mr <= MR_HIGH
    assert probe.flip is True
    assert probe.flip_fresh is True
    assert found["quality"]["kl_recovery"] >= MR_LOW
    assert equal(desk.loaded(), before, report.change.diff.first)


def test_a_full_prefill_is_the_oracle(desk, restore):
    old, new, _ = EDITS["a name"]
    restore()
    report = desk.edit(POLICY.replace(old, new), strategy="full")
    assert report.quality.mr_median == pytest.approx(1.0, abs=1e-3)
    assert deviation(desk.loaded(), desk.fresh(POLICY.replace(old, new))) <= CACHE


def test_answers_before_and_after(desk, restore):
    from kvfix.pipeline.ask import ask

    old, new, _ = EDITS["a name"]
    restore()
    desk.edit(POLICY.replace(old, new), verify=False)
    question = "\n\nThe person responsible for the workshop is"
    previous, current, prefilled = ask(desk.engine, desk.store, desk.head(), question, compare=True, max_new=8)
    assert previous.text.startswith("Tomas Lind")
    assert current.text.startswith("Margaret Oakes")
    assert prefilled.text.startswith("Margaret Oakes")


def test_written_bytes_follow_the_changed_rows(desk, restore):
    for kind in ("same length", "a name"):
        old, new, _ = EDITS[kind]
        restore()
        sizes = desk.edit(POLICY.replace(old, new), verify=False).to_json()["bytes"]
        assert desk.head().row_bytes >= 40_000
        assert sizes["written_bytes"] <= 1.25 * sizes["changed_bytes"]
