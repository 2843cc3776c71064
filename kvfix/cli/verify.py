"""kvfix verify: stored bytes against their checksums and, with --deep, caches against a fresh prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvfix.cli import words
from kvfix.cli.options import ENGINE, READING, Below, Deep, Sample
from kvfix.cli.verb import Run, verb
from kvfix.errors import StoreDamagedError

if TYPE_CHECKING:
    from kvfix.api import KVFix
    from kvfix.pipeline.verify import DeepCheck
    from kvfix.store import Damage


@verb(ENGINE, READING, example="kvfix verify docs --deep --sample 3")
def verify(run: Run, path: Below = None, deep: Deep = False, sample: Sample = 5) -> int:
    """Read every stored byte and compare checksums.

    With --deep, also prefill a sample of documents anew and compare the caches, row by row.
    """
    with run.open(read_only=True) as kv:
        records = None if path is None else kv.select(path)
        with run.out.working("reading the store"):
            found = kv.store.verify(records)
        checks = list(_deep(run, kv, found, path, sample)) if deep else None
        num_documents = len(kv.select(path)) if path or not found else None
    ok = not found and all(check.ok for check in checks or ())
    run.out.document(
        {
            "schema": "kvfix.verify/1",
            "ok": ok,
            "num_documents": num_documents,
            "damages": [asdict(damage) for damage in found],
            "deep": None if checks is None else [_to_json(check) for check in checks],
        }
    )
    _show(run, found, checks, num_documents)
    return 0 if ok else StoreDamagedError.exit_code


def _deep(run: Run, kv: KVFix, found: Sequence[Damage], path: Below, sample: int) -> Iterator[DeepCheck]:
    """Of the documents that are whole."""
    from kvfix.pipeline.verify import deep_verify

    broken = {(damage.corpus, damage.doc) for damage in found}
    whole = [record for record in kv.select(path) if (record.corpus, record.doc_id) not in broken]
    with run.out.working("prefilling a sample of documents"):
        yield from deep_verify(kv.engine, kv.store, whole, sample)


def _show(run: Run, found: Sequence[Damage], checks: Sequence[DeepCheck] | None, num_documents: int | None) -> None:
    files = {(damage.path, damage.what) for damage in found}
    for path, what in sorted(files):
        needing = sorted({d.doc for d in found if (d.path, d.what) == (path, what) and d.doc is not None})
        who = f"; needed by {', '.join(needing)}" if needing else ""
        run.out.complain(f"damaged  {path}: {what}{who}")
    for check in checks or ():
        if not check.ok:
            run.out.complain(f"differs  {check.doc_id}: {_exact(check)}")
    if run.out.speaks:
        for check in checks or ():
            if check.ok:
                run.out.show(f"equal    {words.visible(check.doc_id)}: {_exact(check)}{_stale(check)}")
        run.out.show(_summary(len(files), num_documents))


def _summary(num_files: int, num_documents: int | None) -> str:
    if num_files:
        return words.count(num_files, "damaged file")
    return f"every file of {words.count(num_documents, 'document')} is as it was written"


def _to_json(check: DeepCheck) -> dict[str, Any]:
    body = check.to_json()
    return {"doc": body.pop("doc_id"), **body}


def _exact(check: DeepCheck) -> str:
    return (
        f"{words.count(check.exact_rows, 'exact row')} within {check.error_exact:.1e} of a fresh prefill "
        f"(allowed {check.tolerance:.0e})"
    )


def _stale(check: DeepCheck) -> str:
    return "" if check.error_stale is None else f"; stale rows within {check.error_stale:.1e}"
