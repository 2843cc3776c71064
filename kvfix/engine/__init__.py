"""The engine: transformers models that prefill, recompute chosen rows, score and generate."""

from kvfix.engine.cache import as_transformers_cache
from kvfix.engine.continuations import Continuation
from kvfix.engine.diagnosis import TransplantDiagnosis, Trial, carrier_positions
from kvfix.engine.engine import CacheShape, Engine
from kvfix.engine.evidence import StaleEvidence
from kvfix.engine.gate import run_gate
from kvfix.engine.rotation import rotations_from

__all__ = [
    "CacheShape",
    "Continuation",
    "Engine",
    "StaleEvidence",
    "TransplantDiagnosis",
    "Trial",
    "as_transformers_cache",
    "carrier_positions",
    "rotations_from",
    "run_gate",
]
