"""One document, edited again and again: store, manifest and what loading needs stay within bounds.

KVFIX_LONG=1 makes five hundred edits instead of sixty and prints what they took.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from kvfix.store.records import FOLD_NUM_PATCHES
from tests.operations.site import LONG, Author
from tests.pipeline.desk import Desk

NUM_EDITS = 500 if LONG else 60
KEEP = 1
RECORD_BYTES = 8192  # at most


def num_bytes(folder: Path, pattern: str = "**/*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


def test_nothing_grows_without_bound(folder, gated):
    desk = Desk(folder / "desk", gated("llama", max_position_embeddings=2048))
    author = Author(folder / "docs", seed=1, num_pages=1)
    path = author.corpus / author.names[0]
    desk.build(path.read_text())
    took_ms, manifests, most = [], [], 0.0
    for _ in range(NUM_EDITS):
        author.edit()
        start = time.process_time()
        desk.edit(path.read_text(), k=8, strategy="repair", verify=False)
        took_ms.append((time.process_time() - start) * 1e3)
        most = max(most, check_bounds(desk))
        manifests.append(desk.store._layout.manifest.stat().st_size)
    assert desk.head().version == NUM_EDITS + 1
    assert max(manifests[NUM_EDITS // 2 :]) <= 1.5 * max(manifests[: NUM_EDITS // 2])
    assert desk.store.verify() == []
    assert desk.store.gc(min_age_s=0).num_files == 0
    tenth = NUM_EDITS // 10
    first, last = statistics.median(took_ms[:tenth]), statistics.median(took_ms[-tenth:])
    print(f"\n{NUM_EDITS} edits: {most:.2f} bases at most; an edit's processor time {first:.0f} ms, then {last:.0f} ms")
    desk.store.close()


def check_bounds(desk: Desk) -> float:
    """A base for each version that is kept, and their patches, of which there are few; the size in bases."""
    head = desk.head()
    kept = [record for record in (head, desk.store.previous(head)) if record is not None]
    segments = {ref.name: ref for record in kept for ref in desk.store.detail(record).segments}
    bases = [ref for ref in segments.values() if ref.kind == "base"]
    patches = sum(ref.size for ref in segments.values() if ref.kind == "patch")
    stored = desk.store.stored_bytes()
    assert len(bases) <= KEEP + 1
    assert stored <= (KEEP + 1) * max(base.size for base in bases) + patches + len(kept) * RECORD_BYTES
    # what loading opens: one base and few patches, which hold no more rows than a whole cache has
    assert head.num_patches <= FOLD_NUM_PATCHES
    assert head.patch_rows <= max(head.base_rows, head.num_tokens)
    # nothing but what the two versions need lies there
    assert num_bytes(desk.store.path, "objects/*/*") == sum(ref.size for ref in segments.values())
    assert len(list(desk.store.path.glob("records/*/*"))) == len(kept)
    return stored / max(base.size for base in bases)
