"""Models that stay loaded from one command to the next, as long as their files are what they were."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from kvfix.core import Notify

if TYPE_CHECKING:
    from kvfix.engine import Engine


class WarmEngines:
    """At most `limit` engines, by what they were opened as and by the content of the model's folder."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[tuple[str, ...], Engine] = {}

    def open(self, model: str | None, *, device: str, dtype: str, template: str, notify: Notify) -> Engine:
        """As `Engine.open`, the engine being as if it had just been opened but for its weights."""
        from kvfix.engine import Engine, fingerprint
        from kvfix.engine.locate import locate

        name, folder = locate(model, notify)
        opened_as = (str(model is None), name, str(folder), device, dtype, template)
        key = (*opened_as, fingerprint.folder_digest(folder))
        engine = self._kept.pop(key, None)
        if engine is None:
            self._make_room(opened_as)
            engine = Engine.open(model, device=device, dtype=dtype, template=template, notify=notify)
        self._kept[key] = engine  # the one used last stands last
        # what the gate found is each store's to say
        engine.gate_report, engine.rotations = None, None
        return engine

    def names(self) -> list[str]:
        """What is kept."""
        return [engine.name for engine in self._kept.values()]

    def forget(self) -> None:
        """Keep nothing: the memory is wanted, or an engine's state is in doubt."""
        self._kept.clear()
        _give_memory_back()

    def _make_room(self, opened_as: tuple[str, ...]) -> None:
        """Let go of what this model's files were before, and of what was used longest ago."""
        stale = [key for key in self._kept if key[:-1] == opened_as]
        for key in stale or list(self._kept)[: max(0, len(self._kept) - self._limit + 1)]:
            del self._kept[key]
        _give_memory_back()


def _give_memory_back() -> None:
    import torch

    # a lean start has put what was loaded beyond the collector's sight
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
