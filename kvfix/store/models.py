"""Model keys and gate reports: small sealed files beside the segments."""

from __future__ import annotations

from typing import Any

from kvfix.core import ModelKey
from kvfix.errors import ModelMismatchError
from kvfix.store import jsonfile
from kvfix.store.damage import DamagedFileError
from kvfix.store.layout import Layout


def save_model(layout: Layout, key: ModelKey) -> None:
    """Write the whole key, durably."""
    jsonfile.save_sealed(layout, layout.model(key.fingerprint), key.to_json())


def load_model(layout: Layout, fingerprint: str) -> ModelKey | None:
    """The key of this fingerprint, None if it was never stored; DamagedFileError if it has another now."""
    path = layout.model(fingerprint)
    body = jsonfile.load_sealed(layout, path)
    if body is None:
        return None
    try:
        key = ModelKey.from_json(body)
    except (KeyError, TypeError) as error:
        raise DamagedFileError(path, f"it is no model key ({error})") from error
    if key.fingerprint != fingerprint:
        raise DamagedFileError(path, "it describes another model")
    return key


def check_model(layout: Layout, stored: str, key: ModelKey) -> None:
    """Raise ModelMismatchError, naming what differs, unless `stored` is the fingerprint of `key`."""
    if stored == key.fingerprint:
        return
    other = load_model(layout, stored)
    what = ", ".join(key.differences(other)) if other else "all that is known of it"
    raise ModelMismatchError(
        f"The stored cache was made with another model ({other.name if other else stored}, now {key.name}): "
        f"{what} differs. Build a store of its own for each model."
    )


def save_gate(layout: Layout, fingerprint: str, backend: str, report: dict[str, Any]) -> None:
    """Write a gate report over the one before it, durably."""
    body = {"fingerprint": fingerprint, "backend": backend, "report": report}
    jsonfile.save_sealed(layout, layout.gate(fingerprint, backend), body)


def load_gate(layout: Layout, fingerprint: str, backend: str) -> dict[str, Any] | None:
    """A gate report, None if there is none; DamagedFileError if it is not this model's."""
    path = layout.gate(fingerprint, backend)
    body = jsonfile.load_sealed(layout, path)
    if body is None:
        return None
    if (body.get("fingerprint"), body.get("backend")) != (fingerprint, backend):
        raise DamagedFileError(path, "it belongs to another model")
    return body["report"]
