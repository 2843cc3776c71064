"""Small documents with random rows, and a model of the store that just keeps them."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from kvfix.core import Debt, Document, KVCache, ModelKey

LAYERS, HEADS, DIM = 2, 3, 4
KEY = ModelKey("tiny", "w", "c", "", "t", "float32", "r", (1,), "plain")


def document(text: str, doc_id: str = "a.md", corpus: str = "/corpus") -> Document:
    return Document(corpus, doc_id, text, hashlib.sha256(text.encode()).hexdigest())


def random_rows(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[L, H, N, D]`; values are wider than keys."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(LAYERS, HEADS, num_rows, DIM, generator=generator)
    values = torch.randn(LAYERS, HEADS, num_rows, DIM + 1, generator=generator)
    return keys.to(dtype), values.to(dtype)


def cache_of(num_rows: int, seed: int = 0, room: int = 0, dtype: torch.dtype = torch.float32) -> KVCache:
    keys, values = random_rows(num_rows + room, seed, dtype)
    ids = np.random.default_rng(seed).integers(0, 1000, num_rows)
    return KVCache(keys, values, ids, np.arange(num_rows))


def exact(num_tokens: int) -> Debt:
    return Debt(num_tokens, num_tokens, ((0, num_tokens),) if num_tokens else ())


def build(store, text: str = "one two three", num_rows: int = 20, seed: int = 0, doc_id: str = "a.md", **kind):
    """Commit a base of random rows as the newest version of a document."""
    doc = document(text, doc_id)
    expect = store.head(doc.corpus, doc.doc_id)
    cache = cache_of(num_rows, seed, **kind)
    return store.commit_base(doc, KEY, cache, exact(num_rows), {}, expect)


def edit(store, record, text: str = "one 2 three", positions=(3, 4), seed: int = 1, report: dict | None = None):
    """Recompute rows of a version without moving any."""
    snapshot = store.snapshot(record)
    num_rows = record.num_tokens
    positions = np.array(positions)
    ids = snapshot.token_ids.copy()
    ids[positions] += 1
    keys, values = random_rows(len(positions), seed)
    source = np.arange(num_rows)
    source[positions] = -1
    doc = document(text, record.doc_id, record.corpus)
    debt = Debt(int(positions[0]) if len(positions) else num_rows, num_rows, ((1, num_rows),))
    return store.commit_patch(
        doc, KEY, snapshot, source, positions, keys, values, ids, debt, report or {}, expect=record
    )


def loaded(snapshot) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a snapshot in order, one at a time."""
    rows = snapshot.rows
    pairs = [
        (snapshot.segments[s].keys[:, :, r], snapshot.segments[s].values[:, :, r])
        for s, r in zip(rows.segment, rows.row, strict=True)
    ]
    return torch.stack([k for k, _ in pairs], 2), torch.stack([v for _, v in pairs], 2)
