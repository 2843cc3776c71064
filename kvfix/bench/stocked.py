"""A store for benchmarks: documents with made-up rows, some behind patches, some with moved rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvfix import debt
from kvfix.bench.texts import Texts
from kvfix.core import KVCache
from kvfix.corpus import document_of

if TYPE_CHECKING:
    import torch

    from kvfix.core import Document
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord

FEW_ROWS = 8  # of documents whose rows do not matter
INSERTED = 4  # tokens, by a patch that moves the rows behind it


class Loaded(NamedTuple):
    """A document that is loaded, and how its version came to be."""

    record: VersionRecord
    patches: int
    moved: bool


@dataclass(frozen=True)
class Patch:
    """The rows of one edit: all `[N]` of its new version, M of them new."""

    token_ids: np.ndarray  # [N]
    source: np.ndarray  # [N]: the row before, -1 where it is new
    positions: np.ndarray  # [M]

    @classmethod
    def at(cls, token_ids: np.ndarray, place: int, num_rows: int, inserted: int = 0) -> Patch:
        """`num_rows` new rows from `place` on, the first `inserted` of them put in between the rows there."""
        ids = np.concatenate([token_ids[:place], token_ids[place : place + inserted], token_ids[place:]])
        old = np.arange(len(token_ids))
        source = np.concatenate([old[:place], np.full(inserted, -1), old[place:]])
        positions = np.arange(place, place + num_rows)
        source[positions] = -1
        return cls(ids, source, positions)


class Stock:
    """Puts documents into a store. Their rows are noise: a store does not look at what they say."""

    def __init__(self, engine: Engine, store: Store, folder: Path, context: int) -> None:
        self.engine, self.store = engine, store
        self.files, self.corpus = folder / "files", folder / "made"  # documents with a file, and without one
        self.texts = Texts(engine, context)
        self.cache = self._noise(self.texts.token_ids)

    def _noise(self, token_ids: np.ndarray) -> KVCache:
        import torch

        cache = self.engine.new_cache(token_ids)
        generator = torch.Generator(cache.keys.device).manual_seed(len(token_ids))
        for tensor in (cache.keys, cache.values):
            tensor.normal_(generator=generator)
        return cache

    def document(self, doc_id: str, more: object = "") -> Document:
        """One without a file. No two have the same text, so that none shares a segment with another."""
        return document_of(str(self.corpus), doc_id, f"{self.texts.text} {doc_id} {more}")

    def commit_base(self, document: Document, num_rows: int | None = None) -> VersionRecord:
        """The first rows of the cache, or all, as the document's next version."""
        every = self.cache
        cache = KVCache(*first_rows(every, num_rows), every.token_ids[:num_rows], every.origin[:num_rows])
        head = self.store.head(document.corpus, document.doc_id)
        return self.store.commit_base(document, self.engine.key, cache, debt.fresh(len(cache)), {}, head)

    def commit_patch(self, head: VersionRecord, patch: Patch) -> VersionRecord:
        """New rows as the next version of a head, snapshot included."""
        rows = first_rows(self.cache, len(patch.positions))
        document = self.document(head.doc_id, head.version)
        snapshot, owed = self.store.snapshot(head), debt.fresh(len(patch.token_ids))
        source, positions, ids = patch.source, patch.positions, patch.token_ids
        return self.store.commit_patch(
            document, self.engine.key, snapshot, source, positions, *rows, ids, owed, {}, head
        )

    def patched(self, patches: int, num_rows: int, moved: bool) -> Loaded:
        """A document behind so many patches, evenly spread over it."""
        head = self.commit_base(self.document(f"load-{patches}-{'moved' if moved else 'kept'}.md"))
        ids = self.texts.token_ids
        for number in range(patches):
            place = (number + 1) * (len(ids) - num_rows) // (patches + 1)
            patch = Patch.at(ids, place, num_rows, INSERTED if moved else 0)
            head, ids = self.commit_patch(head, patch), patch.token_ids
        assert head.num_patches == patches
        return Loaded(head, patches, moved)

    def with_files(self, number: int) -> None:
        """Documents that are files too, unchanged; their few rows are nothing that a pass over them looks at."""
        self.files.mkdir()
        for doc_id in (f"{each:04}.md" for each in range(number)):
            (self.files / doc_id).write_text(self.texts.text, encoding="utf-8")
            self.commit_base(document_of(str(self.files), doc_id, self.texts.text), FEW_ROWS)

    def outdated(self, number: int) -> None:
        """Two versions each of a few documents."""
        for doc_id in (f"outdated-{each}.md" for each in range(number)):
            for version in ("before", "after"):
                self.commit_base(self.document(doc_id, version), FEW_ROWS)


def first_rows(cache: KVCache, num_rows: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first rows: keys and values `[L, H, M, D]`."""
    return cache.keys[:, :, :num_rows], cache.values[:, :, :num_rows]
