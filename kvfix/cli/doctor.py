"""kvfix doctor: the environment, the store's health and what the correctness gate finds of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfix.cli.environment import demo_model, environment
from kvfix.cli.options import ENGINE, READING
from kvfix.cli.verb import Run, verb
from kvfix.errors import KVFixError, StoreMissingError

if TYPE_CHECKING:
    from kvfix.api import KVFix


@dataclass(frozen=True)
class Finding:
    """One part of the examination, JSON-ready, and what was wrong with it."""

    facts: dict[str, Any]
    fault: KVFixError | None = None

    def to_json(self) -> dict[str, Any]:
        if self.fault is None:
            return self.facts | {"error": None}
        error = {"code": self.fault.code, "message": self.fault.message, "exit_code": self.fault.exit_code}
        return self.facts | {"error": error}


@verb(ENGINE, READING, example="kvfix doctor --model ./my-model")
def doctor(run: Run) -> int:
    """Examine the environment, the store and the model.

    The model is the one given with --model, else the demo model where it is at hand. What the correctness gate found
    of it is taken from the store, or found anew.
    """
    with run.out.working("looking at the environment"):
        around = environment()
    with run.out.working("looking at the store"):
        store = _store(run)
    model = _model(run) if run.settings.model is not None or demo_model() else None
    run.out.document(
        {
            "schema": "kvfix.doctor/1",
            "environment": around,
            "store": store.to_json(),
            "model": model and model.to_json(),
        }
    )
    if run.out.speaks:
        from kvfix.cli.findings import doctor_lines

        run.out.show(*doctor_lines(around, store, model))
    faults = [finding.fault for finding in (store, model) if finding and finding.fault]
    for fault in faults:
        run.out.complain(f"error: {fault.message}")
    return faults[0].exit_code if faults else 0


def _store(run: Run) -> Finding:
    """The store without reading any segment; a store that is not there yet is no fault."""
    from kvfix.cli.environment import place_facts

    facts = place_facts(run.settings.store)
    try:
        with run.open(read_only=True) as kv:
            return Finding(facts | {"exists": True} | _contents(kv))
    except StoreMissingError:
        return Finding(facts | {"exists": False})
    except KVFixError as fault:
        return Finding(facts | {"exists": True}, fault)


def _contents(kv: KVFix) -> dict[str, Any]:
    records = kv.store.documents()
    return {
        "num_documents": len(records),
        "num_corpora": len({record.corpus for record in records}),
        "num_tokens": sum(record.num_tokens for record in records),
        "stale_rows": sum(record.stale_rows for record in records),
        "stored_bytes": sum(record.stored_bytes for record in records),
        "models": _models(kv),
        "gates": [{"model": model, "backend": backend} for model, backend in kv.store.gates()],
    }


def _models(kv: KVFix) -> list[dict[str, Any]]:
    """The models that built what is stored."""
    found = []
    for fingerprint in sorted({record.model for record in kv.store.documents()}):
        key = kv.store.model(fingerprint)
        found.append({"fingerprint": fingerprint, "name": key and key.name, "dtype": key and key.dtype})
    return found


def _model(run: Run) -> Finding:
    """The gate's figures; a model that kvfix would garble is a fault."""
    facts: dict[str, Any] = {"name": run.settings.model, "supported": None, "gate": None, "kept": None}
    try:
        with run.out.working("loading the model"):
            engine = run.engine()
            facts |= engine.describe() | {"max_tokens": engine.positions.max_tokens, "backend": engine.backend}
            facts |= _gate(run, engine)
    except KVFixError as fault:
        from kvfix.errors import UnsupportedModelError

        return Finding(facts | ({"supported": False} if isinstance(fault, UnsupportedModelError) else {}), fault)
    return Finding(facts | {"supported": True})


def _gate(run: Run, engine: Any) -> dict[str, Any]:
    """What the store remembers of the gate, else the gate itself; nothing is stored."""
    from kvfix.engine import run_gate
    from kvfix.pipeline.admission import recall

    try:
        with run.open(read_only=True) as kv:
            kept = recall(engine, kv.store)
    except KVFixError:
        kept = False
    return {"kept": kept, "gate": engine.gate_report if kept else run_gate(engine)}
