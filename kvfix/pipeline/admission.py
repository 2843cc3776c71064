"""Who may touch which cache: the gate before a model's first use in a store, and the key on every load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.core import ModelKey
from kvfix.errors import ModelMismatchError

if TYPE_CHECKING:
    from kvfix.engine import Engine
    from kvfix.store import Store, VersionRecord

WAYS_OUT = {
    "dtype": "pass the --dtype it was built with",
    "template": "pass the --template it was built with",
    "prefix": "pass the --template it was built with",
}


def admit(engine: Engine, store: Store, *, again: bool = False) -> dict[str, Any]:
    """Let the engine work on this store: use the gate's findings kept there, or run the gate and keep them.

    Sets the engine's rotations. Raises `UnsupportedModelError` for a model that would be garbled.
    """
    from kvfix.engine import run_gate

    if again or not recall(engine, store):
        engine.gate_report = run_gate(engine)
        if not store.read_only:
            store.save_model(engine.key)
            store.save_gate(engine.key.fingerprint, engine.backend, engine.gate_report)
    assert engine.gate_report is not None
    return engine.gate_report


def recall(engine: Engine, store: Store) -> bool:
    """Take over what an earlier gate found for this model on this kind of device, if there was one."""
    from kvfix.engine import rotations_from

    if engine.gate_report is None:
        engine.gate_report = store.gate(engine.key.fingerprint, engine.backend)
        if engine.gate_report is not None:
            engine.rotations = rotations_from(engine.gate_report["rotation"])
    return engine.gate_report is not None


def require_key(engine: Engine, store: Store, record: VersionRecord) -> None:
    """Raise `ModelMismatchError`, naming what differs, unless the record's cache was made by this very model."""
    if record.model == engine.key.fingerprint:
        return
    built = store.model(record.model)
    raise ModelMismatchError(mismatch(record.doc_id, engine.key, built))


def mismatch(doc_id: str, key: ModelKey, built: ModelKey | None) -> str:
    """The message for a cache of another model."""
    if built is None:
        return f"{doc_id}: its cache was built by a model the store no longer describes; build it again with --force"
    differing = key.differences(built)
    shown = ", ".join(f"{name} ({_short(getattr(built, name))} ≠ {_short(getattr(key, name))})" for name in differing)
    hint = next((WAYS_OUT[name] for name in differing if name in WAYS_OUT and len(differing) <= 2), None)
    hint = hint or f"pass --model {built.name}, use another --store, or build again with --force"
    return f"{doc_id}: its cache was built with {built.name}, not with {key.name} as loaded; differing: {shown}; {hint}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "…"
