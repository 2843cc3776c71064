"""Edit after edit: what is loaded is what was in memory, however it is stored by then."""

import random

import numpy as np
import pytest
import torch

from kvfix.engine.gate import deviation
from kvfix.ops.rotate_keys.naive import rotate_keys_naive
from kvfix.pipeline import repair
from kvfix.pipeline.stream import streamed
from tests.pipeline.desk import EDITS, TEXT, equal, spied
from tests.tolerances import CACHE, ROTATION

WORDS = ["harbour", "clerk", "ledger", "crane", "berth", "crown", "gate", "Friday", "workshop", "seal"]


def edited(text: str, chance: random.Random) -> str:
    """One to three small changes at random places."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(text))
        length = chance.choice([0, 0, 1, 3, 9, 20])
        new = chance.choice(["", *WORDS, *WORDS, f"{chance.choice(WORDS)} and {chance.choice(WORDS)}\n"])
        text = text[:start] + new + text[start + length :]
    return text[:430] or "x"


def history(seed: int, num_edits: int) -> list[str]:
    chance, texts = random.Random(seed), [TEXT]
    for _ in range(num_edits):
        texts.append(edited(texts[-1], chance))
    return texts[1:]


@pytest.mark.parametrize(
    ("name", "seed", "num_edits"),
    [("llama", 1, 3), ("llama", 2, 7), ("llama", 3, 12), ("gemma3", 4, 10), ("cohere2", 5, 10), ("smollm3", 6, 10)],
)
def test_loading_gives_what_was_in_memory(desk_of, monkeypatch, name, seed, num_edits):
    desk = desk_of(name)
    desk.build(TEXT)
    # all layers are there to be compared
    monkeypatch.setattr(repair, "streamed", lambda *stored, whole: streamed(*stored, whole=True))
    caches = spied(desk.engine, monkeypatch)
    kinds, patches = set(), []
    for text in history(seed, num_edits):
        caches.clear()
        report = desk.edit(text, k=3, strategy="repair", verify=False)
        if report.outcome == "unchanged":
            continue
        kinds.add(desk.head().kind)
        patches.append(desk.head().num_patches)
        end = len(caches[0]) if report.quality.probes else int(report.plan.positions[-1]) + 1
        loaded = desk.loaded()
        assert equal(loaded, caches[0], end)
        assert np.array_equal(loaded.token_ids, desk.engine.encode(text).token_ids)
        assert desk.store.snapshot(desk.head()).text == text
    assert "patch" in kinds
    assert desk.store.verify() == []
    assert max(patches) > 1
    if num_edits >= 12:
        assert "base" in kinds, "no edit was folded: this test shows less than it should"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_full_at_the_end_of_a_history_is_a_fresh_prefill(desk_of, name):
    desk = desk_of(name)
    desk.build(TEXT)
    texts = history(7, 5)
    for text in texts[:-1]:
        desk.edit(text, k=3, strategy="repair", verify=False)
    desk.edit(texts[-1], strategy="full", verify=False)
    assert desk.head().debt.state == "exact"
    assert deviation(desk.loaded(), desk.fresh(texts[-1])) <= CACHE


def test_compacting_changes_no_row(desk):
    desk.build(TEXT)
    for text in history(8, 4):
        desk.edit(text, k=3, strategy="repair", verify=False)
    assert desk.head().num_patches > 1
    before, record = desk.loaded(), desk.head()
    compacted = desk.store.compact(record)
    assert (compacted.num_patches, compacted.version, compacted.debt) == (0, record.version, record.debt)
    assert equal(desk.loaded(), before)
    # rows that were folded at another place than they were computed at still move from there
    desk.edit("!" + desk.store.snapshot(desk.head()).text, k=3, strategy="repair", verify=False)
    assert desk.loaded().token_ids[1] == before.token_ids[0]


def test_rows_that_moved_fifty_times_are_turned_once(desk_of):
    """In bf16, fifty turns by one would leave fifty roundings."""
    desk = desk_of("llama", dtype="bfloat16")
    desk.build(TEXT)
    base = desk.loaded()
    for n in range(1, 51):
        desk.edit("x" * n + TEXT, k=0, strategy="repair", verify=False, auto_probes=False)
    loaded, num_rows = desk.loaded(), len(base)
    for layer, rotation in enumerate(desk.engine.rotations):
        deltas = torch.full((num_rows,), 50)
        expected = rotate_keys_naive(
            base.layer(layer)[0], deltas, torch.tensor(rotation.inv_freq), rotation.interleaved
        )
        moved = loaded.layer(layer)[0][:, 50:]
        worst = (moved.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert worst <= ROTATION[torch.bfloat16]


def test_debt_over_a_history(desk):
    desk.build(TEXT)
    assert desk.head().debt.behind == ((0, desk.head().num_tokens),)
    desk.edit(EDITS["same length"], k=2, strategy="repair", verify=False)
    first = desk.head().debt
    assert first.edits_behind == 1
    desk.edit(EDITS["same length"].replace("A1", "C3"), k=2, strategy="repair", verify=False)
    second = desk.head().debt
    assert second.exact_until == first.exact_until
    assert second.edits_behind == 2
    assert sum(rows for _, rows in second.behind) == desk.head().num_tokens
    # rows between the two edits are one edit behind, those after the second are two
    assert [edits for edits, _ in second.behind] == [0, 1, 2]


def test_written_bytes_follow_the_changed_rows(desk_of):
    """A patch holds the new rows and little else, also where everything behind them moves."""
    desk = desk_of(
        "llama", num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=80, hidden_size=64
    )
    desk.build(TEXT)
    assert desk.head().row_bytes >= 40_000
    for kind in ("same length", "growing"):
        report = desk.edit(EDITS[kind], k=8, strategy="repair", verify=False).to_json()["bytes"]
        assert desk.head().kind == "patch"
        assert report["changed_bytes"] < report["written_bytes"] <= 1.25 * report["changed_bytes"]
        assert report["changed_bytes"] < report["cache_bytes"] / 4
