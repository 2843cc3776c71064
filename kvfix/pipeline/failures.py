"""What an error that one document raised means for a pass over many."""

from __future__ import annotations

from kvfix.corpus import UnreadableError
from kvfix.errors import (
    DocumentError,
    KVFixError,
    ModelMismatchError,
    NoQuestionError,
    StoreBusyError,
    StoreNotWritableError,
    UnsupportedModelError,
    UsageError,
    first_line,
)

# what concerns the whole pass, not one document
STOPPING = (UsageError, StoreBusyError, ModelMismatchError, UnsupportedModelError, StoreNotWritableError)


def stops(error: Exception) -> bool:
    """Whether an error concerns every document: what a selector misses of one, another may have."""
    return isinstance(error, STOPPING) and not isinstance(error, NoQuestionError)


def failure(error: Exception) -> tuple[str, str]:
    """Outcome and reason of a document that raised `error`, to be called while it is handled.

    Raises it again where it concerns the whole pass. A model may raise anything: the other documents are not to suffer
    for it.
    """
    if stops(error):
        raise error
    if isinstance(error, UnreadableError):
        return "skipped", error.reason
    if isinstance(error, DocumentError):
        return "skipped", error.message
    if isinstance(error, KVFixError):
        return "failed", error.message
    return "failed", f"{type(error).__name__}: {first_line(error)}"
