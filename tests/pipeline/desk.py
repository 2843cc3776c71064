"""A store, an engine and a folder of texts: what the pipeline's tests work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvfix.core import Document, KVCache
from kvfix.corpus import document_of
from kvfix.engine import Engine
from kvfix.errors import NonFiniteError
from kvfix.pipeline.build import Built, build
from kvfix.pipeline.edit import edit
from kvfix.pipeline.load import load_cache
from kvfix.pipeline.plan import EditOptions
from kvfix.pipeline.report import EditReport
from kvfix.store import Store, VersionRecord

TEXT = """# Refunds

Customers may return goods within 30 days of purchase. The clerk at desk 4 signs the slip and keeps one copy.

| code | meaning |
|------|---------|
| A1 | full refund |
| B2 | half refund |

- Bring the receipt.
- Bring the box.

Write to the refund office, second floor. Nobody else decides.
"""

# every kind of edit, from TEXT
EDITS = {
    "same length": TEXT.replace("30 days", "45 days"),
    "growing": TEXT.replace("30 days", "30 working days, holidays apart,"),
    "shrinking": TEXT.replace(" and keeps one copy", ""),
    "several spans": TEXT.replace("30 days", "fifteen days").replace("half refund", "none").replace("Nobody", "No one"),
    "first token": TEXT.replace("# R", "> R", 1),
    "before the first token": "Note. " + TEXT,
    "last line deleted": TEXT.removesuffix("Write to the refund office, second floor. Nobody else decides.\n"),
    "last token": TEXT.removesuffix("\n") + " ",
    "appended": TEXT + "\nClosed in August.\n",
    "white space only": TEXT.replace("return goods", "return  goods"),
    "all line ends": TEXT.replace("\n", "\r\n"),
    "all replaced": "Nothing of this is left: 0123456789 ZYXWVUTSRQ.",
    "one character": "x",
}


class Desk:
    """One document or more in a store of their own."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.engine = engine
        self.corpus = folder / "corpus"
        self.corpus.mkdir(parents=True, exist_ok=True)
        self.store = Store.open(folder / "store", create=True)

    def document(self, text: str, doc_id: str = "a.md") -> Document:
        """The text, also written to its file."""
        (self.corpus / doc_id).write_bytes(text.encode())
        return document_of(str(self.corpus), doc_id, text)

    def head(self, doc_id: str = "a.md") -> VersionRecord:
        record = self.store.head(str(self.corpus), doc_id)
        assert record is not None
        return record

    def build(self, *texts: str, **options: object) -> list[Built]:
        """Build a.md, b.md, … of these texts."""
        documents = [self.document(text, f"{chr(97 + n)}.md") for n, text in enumerate(texts)]
        return list(build(self.engine, self.store, documents, **options))  # type: ignore[arg-type]

    def edit(self, text: str, doc_id: str = "a.md", **options: object) -> EditReport:
        document = self.document(text, doc_id)
        return edit(self.engine, self.store, self.head(doc_id), document, EditOptions(**options))  # type: ignore[arg-type]

    def loaded(self, doc_id: str = "a.md", room: int = 0) -> KVCache:
        return load_cache(self.engine, self.store.snapshot(self.head(doc_id), check=True), room)

    def fresh(self, text: str) -> KVCache:
        return self.engine.prefill(self.engine.encode(text).token_ids)


def equal(one: KVCache, other: KVCache, end: int | None = None) -> bool:
    """Whether rows up to `end`, and their tokens, are the same bit for bit."""
    end = len(other) if end is None else end
    return (
        torch.equal(one.keys[:, :, :end], other.keys[:, :, :end])
        and torch.equal(one.values[:, :, :end], other.values[:, :, :end])
        and np.array_equal(one.token_ids[:end], other.token_ids[:end])
    )


def spied(engine: Engine, monkeypatch) -> list[KVCache]:
    """The caches that the engine recomputes rows of from now on, in order."""
    caches: list[KVCache] = []
    real: Callable = engine.recompute

    def recompute(cache: KVCache, positions: np.ndarray, **kwargs: object) -> None:
        caches.append(cache)
        real(cache, positions, **kwargs)

    monkeypatch.setattr(engine, "recompute", recompute)
    return caches


def without_commit(desk: Desk, monkeypatch, doc_id: str) -> None:
    """From now on, a patch of this document is not finite when it is to be stored."""
    commit: Callable = desk.store.commit_patch

    def commits(document: Document, *args: object) -> object:
        if document.doc_id == doc_id:
            raise NonFiniteError
        return commit(document, *args)

    monkeypatch.setattr(desk.store, "commit_patch", commits)
