"""Any chain of edits composes to the same rows as a list of rows that is simply edited."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfix.core import Debt
from kvfix.store import Store, sources, texts
from tests.store.conftest import MEMORY
from tests.store.helpers import KEY, cache_of, document, exact, loaded, random_rows

SPANS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=4)
EDITS = st.lists(st.tuples(SPANS, st.lists(st.floats(0, 0.999), max_size=4)), min_size=1, max_size=12)


@dataclass
class Naive:
    """The rows of a document, moved about one by one."""

    keys: list[torch.Tensor]  # [L, H, D] each
    values: list[torch.Tensor]
    origin: list[int]
    ids: list[int]


def naive_source(spans: list[tuple[int, int, int]], num_old: int) -> list[int]:
    """Skip some rows, drop some, insert some; the tail is kept."""
    source, at = [], 0
    for skip, drop, insert in spans:
        source += range(at, min(at + skip, num_old))
        at = min(at + skip + drop, num_old)
        source += [-1] * insert
    return source + list(range(at, num_old))


def apply(naive: Naive, source: list[int], positions: list[int], keys, values, ids) -> Naive:
    new = Naive([], [], [], list(ids))
    for place, old in enumerate(source):
        at = positions.index(place) if place in positions else None
        new.keys.append(naive.keys[old] if at is None else keys[:, :, at])
        new.values.append(naive.values[old] if at is None else values[:, :, at])
        new.origin.append(naive.origin[old] if at is None else place)
    return new


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(num_rows=st.sampled_from([1, 7, 60, 300]), edits=EDITS)
def test_chains_of_edits_compose(num_rows, edits):
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as folder,
        Store.open(Path(folder, "s"), create=True) as store,
    ):
        cache = cache_of(num_rows)
        record = store.commit_base(document("start"), KEY, cache, exact(num_rows), {}, None)
        naive = Naive(
            list(cache.keys.unbind(2)), list(cache.values.unbind(2)), list(range(num_rows)), [*cache.token_ids]
        )
        for number, (spans, chosen) in enumerate(edits):
            source = naive_source(spans, len(naive.ids))
            extra = {int(share * len(source)) for share in chosen if source}
            positions = sorted({place for place, old in enumerate(source) if old < 0} | extra)
            ids = [number * 1000 + place if old < 0 else naive.ids[old] for place, old in enumerate(source)]
            keys, values = random_rows(len(positions), seed=number + 1)
            naive = apply(naive, source, positions, keys, values, ids)
            text = "x" * number + "–" * len(source)
            record = store.commit_patch(
                document(text),
                KEY,
                store.snapshot(record),
                np.array(source, np.int64),
                np.array(positions, np.int64),
                keys,
                values,
                np.array(ids, np.int64),
                Debt(0, len(ids), ((1, len(ids)),)),
                {},
                record,
            )
            snapshot = store.snapshot(record, check=True)
            assert snapshot.text == text
            assert snapshot.token_ids.tolist() == naive.ids
            assert snapshot.rows.origin.tolist() == naive.origin
            if naive.ids:
                assert torch.equal(loaded(snapshot)[0], torch.stack(naive.keys, 2))
                assert torch.equal(loaded(snapshot)[1], torch.stack(naive.values, 2))
        assert store.verify() == []
        assert store.gc(min_age_s=0).num_files == 0


@given(st.lists(st.integers(-1, 9), max_size=20))
def test_source_maps_survive_as_runs(numbers):
    source = np.array(numbers, np.int64)
    runs = sources.to_runs(source)
    assert sources.from_runs(runs, len(source), 10).tolist() == numbers


def test_a_moved_tail_is_one_run():
    source = np.concatenate([np.arange(100), np.full(7, -1), np.arange(100, 4000)])
    assert sources.to_runs(source).tolist() == [[0, 0, 100], [107, 100, 3900]]


@given(st.text(max_size=60), st.text(max_size=60))
def test_texts_survive_beside_the_one_before(text, previous):
    assert texts.unpack(texts.pack(text, previous), previous) == text
    assert texts.unpack(texts.pack(text, None), None) == text


def test_an_edited_text_costs_its_change_only():
    words = " ".join(str(number * number) for number in range(3000))[:20_000]
    assert len(texts.pack(words.replace("10000", "ten thousand"), words)) < 400
