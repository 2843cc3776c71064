"""kvfix bench items --generate: write benchmark items made for one tokenizer, among somebody's own documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvfix.cli import words
from kvfix.cli.options import numbers
from kvfix.cli.verb import Run
from kvfix.core import Document
from kvfix.errors import UsageError

if TYPE_CHECKING:
    from kvfix.bench.generate import Wanted

ADJACENT = ("direct", "derived")  # conditions without a distance


def kinds(
    conditions: str, distances: str, count: int, variant: str, split: str, context: int, seed: int
) -> list[Wanted]:
    """Each condition, at each of the distances where it knows any. Raises `UsageError` for unknown names."""
    from kvfix.bench.generate import Wanted

    names = dict.fromkeys(name.strip() for name in conditions.split(","))
    places = dict.fromkeys(numbers("--distances", distances))
    pairs = [(name, place) for name in names for place in ((0,) if name in ADJACENT else places)]
    return [Wanted(name, count, distance, variant, split, context, seed) for name, distance in pairs]


def write_items(run: Run, path: Path | None, filler: Path | None, wanted: list[Wanted]) -> None:
    """Write the items of all kinds. Raises `UsageError` where there is no place or no filler, or a file is there."""
    if path is None or filler is None:
        raise UsageError("--generate needs --items FILE.jsonl to write, and --filler DIR, documents to set them among")
    if path.exists():
        raise UsageError(f"{path} is there already; give another name")
    from kvfix.bench.generate import Filler, generate
    from kvfix.bench.items import dump_items
    from kvfix.corpus import scan

    documents = [found.text for found in scan(filler) if isinstance(found, Document)]
    text = run.engine().text
    laid = Filler(documents, text)
    made = [item for each in wanted for item in generate(text, laid, each)]
    path.parent.mkdir(parents=True, exist_ok=True)
    dump_items(path, made)
    run.out.document({"schema": "kvfix.generate/1", "items": str(path), "num_items": len(made)})
    run.out.note(f"wrote {words.count(len(made), 'item')} to {path}")
