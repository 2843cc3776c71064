"""Token diffs: exact at any size, few spans, bounded time and memory."""

import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfix import diff as diff_module
from kvfix.core import EditSpan, TokenDiff
from kvfix.diff import diff_tokens, slice_text, span_texts


def ids(*values):
    return np.array(values, np.int64)


def check(old, new, diff: TokenDiff, join_gap=9):
    """Every promise of a TokenDiff, whatever produced it."""
    assert diff.num_old == len(old)
    assert diff.num_new == len(new)
    assert diff.source.dtype == np.int64
    kept = np.flatnonzero(diff.source >= 0)
    assert (old[diff.source[kept]] == new[kept]).all()
    assert (np.diff(diff.source[kept]) > 0).all()
    in_span = np.zeros(len(new), bool)
    rebuilt, old_at, last_end = [], 0, -join_gap
    for span in diff.spans:
        assert span.num_old or span.num_new
        assert span.new_start - last_end >= join_gap
        in_span[span.new_start : span.new_end] = True
        rebuilt += [*old[old_at : span.old_start], *new[span.new_start : span.new_end]]
        old_at, last_end = span.old_end, span.new_end
    assert [*rebuilt, *old[old_at:]] == list(new)
    assert ((diff.source < 0) == in_span).all()


small_ids = st.lists(st.integers(0, 3), max_size=40).map(lambda values: np.array(values, np.int64))


@given(small_ids, small_ids, st.sampled_from([1, 2, 9]))
def test_any_two_sequences(old, new, join_gap):
    check(old, new, diff_tokens(old, new, join_gap), join_gap)


@given(small_ids, small_ids)
def test_smallest_edits_without_joining(old, new):
    """As many rows are kept as a longest common subsequence has."""
    table = np.zeros((len(old) + 1, len(new) + 1), int)
    for i in range(len(old)):
        for j in range(len(new)):
            same = old[i] == new[j]
            table[i + 1, j + 1] = table[i, j] + 1 if same else max(table[i, j + 1], table[i + 1, j])
    assert (diff_tokens(old, new, join_gap=1).source >= 0).sum() == table[-1, -1]


@settings(max_examples=50)
@given(st.data())
def test_pinned_path_on_edited_copies(data):
    """The path for large inputs, forced upon small ones."""
    old = np.array(data.draw(st.lists(st.integers(0, 30), min_size=30, max_size=200)), np.int64)
    new = old.tolist()
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(new)))
        new[at : at + data.draw(st.integers(0, 4))] = data.draw(st.lists(st.integers(0, 60), max_size=4))
    new = np.array(new, np.int64)
    limit, diff_module.DIRECT_CELLS = diff_module.DIRECT_CELLS, 4
    try:
        check(old, new, diff_tokens(old, new))
    finally:
        diff_module.DIRECT_CELLS = limit


def test_a_hash_collision_is_not_believed(monkeypatch):
    monkeypatch.setattr(diff_module, "DIRECT_CELLS", 4)
    monkeypatch.setattr(diff_module, "_unique_grams", lambda ids: (np.arange(2, dtype=np.uint64), np.array([1, 3])))
    old, new = ids(1, 2, 3, 4, 5), ids(6, 2, 7, 8, 9)
    check(old, new, diff_tokens(old, new, join_gap=1), join_gap=1)


@pytest.mark.parametrize(
    ("old", "new", "spans"),
    [
        ([], [], []),
        ([1, 2], [1, 2], []),
        ([], [1, 2], [(0, 0, 0, 2)]),
        ([1, 2], [], [(0, 2, 0, 0)]),
        ([1, 2, 3], [1, 9, 3], [(1, 2, 1, 2)]),
        ([1, 2, 3], [9, 2, 3], [(0, 1, 0, 1)]),
        ([1, 2, 3], [1, 2, 9], [(2, 3, 2, 3)]),
        ([1, 2, 3], [1, 2], [(2, 3, 2, 2)]),
        # repeated content: the insertion and the deletion stand last
        ([7, 7, 7], [7, 7, 7, 7], [(3, 3, 3, 4)]),
        ([7, 7, 7, 7], [7, 7], [(2, 4, 2, 2)]),
        ([1, 5, 2], [1, 5, 5, 2], [(2, 2, 2, 3)]),
    ],
)
def test_small_cases(old, new, spans):
    diff = diff_tokens(ids(*old), ids(*new))
    assert diff.spans == tuple(EditSpan(*span) for span in spans)
    check(ids(*old), ids(*new), diff)


@pytest.mark.parametrize(("gap", "num_spans"), [(8, 1), (9, 2)])
def test_spans_join_below_the_gap(gap, num_spans):
    equal = list(range(100, 100 + gap))
    diff = diff_tokens(ids(1, *equal, 2), ids(8, *equal, 9))
    assert len(diff.spans) == num_spans
    assert diff.num_span == (2 if num_spans == 2 else 2 + gap)


@given(small_ids, small_ids)
def test_insertions_and_deletions_stand_as_late_as_they_can(old, new):
    """Amid other edits, repeated content is treated as it is between trimmed ends."""
    for span in diff_tokens(old, new, join_gap=1).spans:
        if not span.num_old and span.new_end < len(new):
            assert new[span.new_start] != new[span.new_end]
        if not span.num_new and span.old_end < len(old):
            assert old[span.old_start] != old[span.old_end]


def test_a_replacement_is_not_slid_apart():
    assert diff_tokens(ids(1, 1, 1, 1), ids(2, 1), join_gap=1).spans == (EditSpan(0, 3, 0, 1),)


def test_a_moved_block_keeps_the_rest():
    a, b = list(range(100, 150)), list(range(200, 250))
    diff = diff_tokens(ids(1, *a, *b, 2), ids(1, *b, *a, 2))
    assert diff.num_span == 50


def test_large_table_with_one_value_replaced():
    old = np.tile(ids(91, 1500, 91, 30, 91, 198), 3000)
    new = old.copy()
    new[6 * 1234 + 3] = 45
    started = time.perf_counter()
    diff = diff_tokens(old, new)
    assert time.perf_counter() - started < 0.1
    assert diff.spans == (EditSpan(7407, 7408, 7407, 7408),)


def test_large_table_with_two_values_replaced():
    old = np.tile(ids(91, 1500, 91, 30, 91, 198), 3000)
    new = old.copy()
    new[[6 * 10 + 3, 6 * 2900 + 3]] = 45
    diff = diff_tokens(old, new)
    assert [(span.num_old, span.num_new) for span in diff.spans] == [(1, 1), (1, 1)]


LARGE = """
import time
from pathlib import Path
import numpy as np
from kvfix.diff import diff_tokens
rng = np.random.default_rng(0)
old = rng.integers(0, 49152, 100_000)
new = {new}
started = time.perf_counter()
diff = diff_tokens(old, new)
seconds = time.perf_counter() - started
kept = diff.source >= 0
assert (old[diff.source[kept]] == new[kept]).all()
# this program's own peak: ru_maxrss would count the process that started it
peak_kb = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
print(seconds, peak_kb / 1e6, diff.num_span)
"""


@pytest.mark.parametrize(
    ("new", "most_in_spans"),
    [
        ("np.insert(np.delete(old, np.arange(0, 99_000, 300)), np.arange(5, 99_000, 500), 7)", 3_000),
        ("rng.integers(0, 49152, 100_000)", 100_000),
    ],
    ids=["scattered", "unrelated"],
)
def test_100k_tokens_stay_within_time_and_memory(new, most_in_spans):
    command = [sys.executable, "-c", LARGE.format(new=new)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak_gb, num_span = map(float, done.stdout.split())
    assert seconds < 5
    assert peak_gb < 1.5
    assert num_span <= most_in_spans


def words(text):
    """A toy tokenizer whose tokens carry their leading space: ids and offsets."""
    starts = [i for i, char in enumerate(text) if char == " " or i == 0]
    offsets = list(zip(starts, [*starts[1:], len(text)], strict=True))
    return ids(*(zlib.crc32(text[a:b].encode()) for a, b in offsets)), np.array(offsets).reshape(-1, 2)


def test_span_texts_are_cut_from_the_text():
    old, new = "Refunds within 30 days.", "Refunds within  forty-five days."
    (old_ids, old_offsets), (new_ids, new_offsets) = words(old), words(new)
    prefix = ids(-1, -2)
    diff = diff_tokens(np.concatenate((prefix, old_ids)), np.concatenate((prefix, new_ids)))
    assert span_texts(diff, old, old_offsets, new, new_offsets, num_prefix=2) == [(" 30", "  forty-five")]


def test_slice_text_edges():
    text = "a  b é"
    trimmed = np.array([(0, 1), (3, 4), (5, 6), (5, 6)])  # spaces in no token; é is two byte tokens
    assert slice_text(text, trimmed, 1, 2) == "  b"
    assert slice_text(text, trimmed, 3, 4) == "é"
    assert slice_text(text, trimmed, 1, 1) == ""
    assert slice_text("", np.empty((0, 2), int), 0, 0) == ""
