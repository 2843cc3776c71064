"""What the config says of positions: the context's length, and whether frequencies depend on a text's length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PositionFacts:
    """Limits that a model's position encoding sets."""

    max_tokens: int | None  # longest text the model takes; None: no limit known
    length_limit: int | None  # above this many tokens the frequencies are others (LongRoPE); None: never
    rope_types: tuple[str, ...]

    def crosses(self, num_old: int, num_new: int) -> bool:
        """Whether an edit makes stored keys void because frequencies depend on the length."""
        return self.length_limit is not None and max(num_old, num_new) > self.length_limit

    def limit_behind(self, num_tokens: int) -> int | None:
        """How long a text of `num_tokens` may grow while its keys stay valid; None: no limit known."""
        if self.length_limit is not None and num_tokens <= self.length_limit:
            return min(self.length_limit, self.max_tokens or self.length_limit)
        return self.max_tokens


def position_facts(config: Any) -> PositionFacts:
    """Read them from a transformers config."""
    parameters = _rope_parameters(config)
    types = tuple(sorted({str(p.get("rope_type", "default")) for p in parameters}))
    max_tokens = getattr(config, "max_position_embeddings", None)
    limit = None
    if "longrope" in types:
        given = [p.get("original_max_position_embeddings") for p in parameters]
        limit = next((g for g in given if g), None) or getattr(config, "original_max_position_embeddings", None)
    if "dynamic" in types:
        # the frequencies of a longer text change with every token: such texts are refused
        given = [p.get("original_max_position_embeddings") for p in parameters]
        max_tokens = min([g for g in [max_tokens, *given] if g], default=None)
    return PositionFacts(max_tokens, limit, types)


def _rope_parameters(config: Any) -> list[dict]:
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    return nested or ([given] if given else [])
