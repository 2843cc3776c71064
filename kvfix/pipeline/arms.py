"""Arms: the answers of caches to probes, those of several caches from as few passes as they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvfix import metrics
from kvfix.probes import Probe

if TYPE_CHECKING:
    import torch

    from kvfix.core import KVCache
    from kvfix.engine import Continuation, Engine

# positions whose whole distribution is kept for KL: 50 MB an arm with a vocabulary of 200,000
KL_POSITIONS = 64
MAX_NEW = 16


@dataclass
class Arm:
    """The answers of one cache."""

    margins: list[float]
    logprobs: list[torch.Tensor | None]  # [T, V] at the new answer's positions; KL_POSITIONS in all, None beyond
    continuations: list[str] | None  # greedy; None: not asked for


class Asking(NamedTuple):
    """Probes that are put to a cache."""

    cache: KVCache
    probes: Sequence[Probe]
    oracle: bool  # whether an oracle will be asked too: only then distributions and continuations are kept

    @property
    def num_tokens(self) -> int:
        """Of all questions and answers."""
        return sum(2 * len(probe.query_ids) + len(probe.new_ids) + len(probe.old_ids) for probe in self.probes)


class Tried(NamedTuple):
    """One answer of one probe."""

    probe: int  # its number
    side: str  # new or old
    continuation: Continuation


def ask_arm(engine: Engine, cache: KVCache, probes: Sequence[Probe], *, oracle: bool) -> Arm:
    """Put the probes to one cache."""
    return ask_arms(engine, [Asking(cache, probes, oracle)])[0]


def ask_arms(engine: Engine, askings: Sequence[Asking]) -> list[Arm]:
    """Put probes to caches, a document's behind its own, packed into as few passes as they fit."""
    tried = [_tried(asking.probes) for asking in askings]
    jobs = [(asking.cache, one.continuation) for asking, own in zip(askings, tried, strict=True) for one in own]
    answers = engine.answer_logprobs_of(jobs)
    scored = [_scored(asking, own, answers) for asking, own in zip(askings, tried, strict=True)]
    said = _continuations(engine, askings)
    return [Arm(*figures, continued) for figures, continued in zip(scored, said, strict=True)]


def _tried(probes: Sequence[Probe]) -> list[Tried]:
    from kvfix.engine import Continuation

    return [
        Tried(n, side, Continuation(list(probe.query_ids), list(answer)))
        for n, probe in enumerate(probes)
        for side, answer in (("new", probe.new_ids), ("old", probe.old_ids))
        if answer
    ]


def _scored(
    asking: Asking, tried: Sequence[Tried], answers: Iterator[torch.Tensor]
) -> tuple[list[float], list[torch.Tensor | None]]:
    """Margins and distributions of a cache's probes; takes what it tried from `answers`."""
    number = len(asking.probes)
    means: dict[tuple[int, str], float] = {}
    distributions: list[torch.Tensor | None] = [None] * number
    budget = KL_POSITIONS if asking.oracle else 0
    for (n, side, continuation), logprobs in zip(tried, islice(answers, len(tried)), strict=True):
        means[n, side] = _mean_logprob(logprobs, continuation.answer_ids)
        if distributions[n] is None and budget > 0:
            distributions[n] = logprobs[:budget].clone()
            budget -= min(budget, len(logprobs))
    margins = [metrics.margin(means.get((n, "new")), means.get((n, "old"))) or 0.0 for n in range(number)]
    return margins, distributions


def _mean_logprob(logprobs: torch.Tensor, answer: Sequence[int]) -> float:
    import torch

    return float(logprobs.gather(1, torch.tensor(answer)[:, None]).mean())


def _continuations(engine: Engine, askings: Sequence[Asking]) -> list[list[str] | None]:
    """What each cache goes on with behind each question; None where no oracle is asked."""
    jobs = [(asking.cache, list(probe.query_ids)) for asking in askings if asking.oracle for probe in asking.probes]
    texts = map(engine.text.decode, engine.generate_of(jobs, MAX_NEW) if jobs else [])
    return [list(islice(texts, len(asking.probes))) if asking.oracle else None for asking in askings]
