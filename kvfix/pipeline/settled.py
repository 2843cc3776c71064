"""The part of a sync that needs no model: what is settled at once, and the order in which the rest comes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvfix.core import Document
from kvfix.corpus import UnreadableError, read_document
from kvfix.pipeline.changes import Finding, Key, Source, Walk
from kvfix.pipeline.synced import Synced, SyncOptions, or_failed

if TYPE_CHECKING:
    from kvfix.store import Store

OUTCOMES = {"unchanged": "unchanged", "skipped": "skipped", "gone": "removed"}


def planned(found: Iterable[Finding]) -> Iterator[Synced]:
    """What a pass would do, nothing done."""
    for finding in found:
        kept = None if finding.kind == "renamed" else finding.record
        yield Synced(*finding.key, OUTCOMES.get(finding.kind, "planned"), finding.reason, kept)


def settled(
    store: Store, found: Iterable[Finding], options: SyncOptions, walk: Walk, work: list[Finding]
) -> Iterator[Synced]:
    """The reports of what needs no model; the other findings are put into `work`."""
    for finding in found:
        if finding.kind in ("new", "changed"):
            work.append(finding)
            continue
        done = or_failed(finding, partial(_settle, store, finding, options, walk))
        if done is None:
            work.append(replace(finding, kind="new", record=None))
        else:
            yield done


def _settle(store: Store, finding: Finding, options: SyncOptions, walk: Walk) -> Synced | None:
    """The report of one document; None for one renamed whose text has changed since we looked."""
    key, record = finding.key, finding.record
    if finding.kind == "renamed":
        assert record is not None
        document = _read(finding, walk)
        if document is None or document.sha256 != record.text_sha256:
            return None
        return Synced(*key, "relinked", finding.reason, store.relink(record, document), record.doc_id)
    if finding.kind == "gone" and options.prune:
        store.remove(*key)
        return Synced(*key, "pruned", finding.reason)
    return Synced(*key, OUTCOMES[finding.kind], finding.reason, record)


def _read(finding: Finding, walk: Walk) -> Document | None:
    try:
        return read_document(os.path.join(*finding.key), finding.corpus, walk.max_bytes)
    except UnreadableError:
        return None


def ordered(work: list[Finding], first: Sequence[Key], order: str) -> list[Finding]:
    """Those left by the last pass, then as asked for: a wrong answer is worse than none, so changed before new."""
    place = {key: number for number, key in enumerate(first)}

    def rank(finding: Finding) -> tuple:
        late = order == "priority" and finding.kind == "new"
        return place.get(finding.key, len(place)), late, finding.num_chars, finding.key

    return sorted(work, key=rank)


def note_left(
    store: Store, sources: Sequence[Source], noted: dict[str, list[str]], seen: set[Key], left: Sequence[Finding]
) -> None:
    """Remember what was left; of a corpus that was not looked through, what had been left stays so."""
    whole = {source.corpus for source in sources if source.whole}
    for corpus, before in noted.items():
        now = [finding.doc_id for finding in left if finding.corpus == corpus]
        now += [] if corpus in whole else [doc_id for doc_id in before if (corpus, doc_id) not in seen]
        if now != before:
            store.set_left(corpus, now)
