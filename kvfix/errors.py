"""Every error kvfix raises on purpose: the docstring is the fallback message, the class carries the exit code."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of another library's message, '' where it says nothing."""
    return (str(error).strip().splitlines() or [""])[0]


class KVFixError(Exception):
    """Something went wrong."""

    code = "error"
    exit_code = 1

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())

    @property
    def message(self) -> str:
        return str(self.args[0])


class OutputLostError(KVFixError):
    """Standard output cannot be written."""

    code = "output_lost"


class NonFiniteError(KVFixError):
    """The new rows hold NaN or infinity; nothing was stored and the old entry is kept."""

    code = "non_finite"


class UsageError(KVFixError):
    """The command cannot be understood as given."""

    code = "usage"
    exit_code = 2


class NoQuestionError(UsageError):
    """The selector looks at a document with a question, and there is none about this one: give --query, or probes."""


class UnknownSelectorError(UsageError):
    """No selector has this name."""

    code = "unknown_selector"


class UnknownDocumentError(UsageError):
    """The store does not know this document."""

    code = "unknown_document"


class UnknownModelError(UsageError):
    """No model is found under this name."""

    code = "unknown_model"


class StoreMissingError(UsageError):
    """There is no store here yet."""

    code = "store_missing"


class DocumentError(KVFixError):
    """The document cannot be read or handled."""

    code = "document"
    exit_code = 3


class StoreBusyError(KVFixError):
    """Another process is writing to the store."""

    code = "store_busy"
    exit_code = 4


class DaemonBusyError(KVFixError):
    """Another daemon listens at this socket."""

    code = "daemon_busy"
    exit_code = 4


class NoDaemonError(UsageError):
    """No daemon listens at this socket."""

    code = "no_daemon"


class ModelMismatchError(KVFixError):
    """The model, tokenizer or dtype is not the one the cache was built with."""

    code = "model_mismatch"
    exit_code = 5


class StoreDamagedError(KVFixError):
    """A file of the store is damaged."""

    code = "store_damaged"
    exit_code = 6


class LowQualityError(KVFixError):
    """The repaired cache's margin recovery is below the required minimum; nothing was stored."""

    code = "low_quality"
    exit_code = 7


class UnsupportedModelError(KVFixError):
    """The model cannot be repaired correctly."""

    code = "unsupported_model"
    exit_code = 8


class StoreNotWritableError(KVFixError):
    """The store cannot be written."""

    code = "store_not_writable"
    exit_code = 9
