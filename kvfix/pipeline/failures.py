"""What an error that one document raised means for a pass over many."""

from __future__ import annotations

from kvfix.corpus import UnreadableError
from kvfix.errors import (
    DocumentError,
    KVFixError,
    ModelMismatchError,
    StoreBusyError,
    StoreNotWritableError,
    UnsupportedModelError,
    UsageError,
    first_line,
)

# what concerns the whole pass, not one document
STOPPING = (UsageError, StoreBusyError, ModelMismatchError, UnsupportedModelError, StoreNotWritableError)


def failure(error: Exception) -> tuple[str, str]:
    """Outcome and reason of a document that raised `error`, to be called while it is handled.

    Raises it again where it concerns the whole pass. A model may raise anything: the other documents are not to suffer
    for it.
    """
    if isinstance(error, STOPPING):
        raise error
    if isinstance(error, UnreadableError):
        return "skipped", error.reason
    if isinstance(error, DocumentError):
        return "skipped", error.message
    if isinstance(error, KVFixError):
        return "failed", error.message
    return "failed", f"{type(error).__name__}: {first_line(error)}"
