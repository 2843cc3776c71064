"""Selector names and their classes: a literal table, so that naming one imports nothing else."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

from kvfix.errors import UnknownSelectorError
from kvfix.selectors.base import Selector

SELECTORS = {
    "editlocal": "editlocal_selector.EditLocalSelector",
    "linked": "linked_selector.LinkedSelector",
    "kindred": "kindred_selector.KindredSelector",
    "asked": "asked_selector.AskedSelector",
    "boundary": "boundary_selector.BoundarySelector",
    "structure": "structure_selector.StructureSelector",
    "attention": "attention_selector.AttentionSelector",
    "deviation": "deviation_selector.DeviationSelector",
    "epic": "epic_selector.EpicSelector",
    "random": "random_selector.RandomSelector",
    "exact": "exact_selector.ExactSelector",
    "causal": "causal_selector.CausalSelector",
    "carrier": "carrier_selector.CarrierSelector",
}


def get_selector(name: str, **settings: Any) -> Selector:
    """The selector of this name; settings that it has no field for are left out.

    Raises `UnknownSelectorError` with the names there are.
    """
    if name not in SELECTORS:
        raise UnknownSelectorError(f"unknown selector {name!r}; there are: {', '.join(SELECTORS)}")
    module, _, cls = SELECTORS[name].partition(".")
    selector = getattr(importlib.import_module(f"kvfix.selectors.{module}"), cls)
    known = {field.name for field in fields(selector)}
    return selector(**{key: value for key, value in settings.items() if key in known})
