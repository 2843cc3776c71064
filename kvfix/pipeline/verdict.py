"""What a repair's quality lacks, in words: whether it will do, and what nobody should overlook."""

from __future__ import annotations

from collections.abc import Sequence

from kvfix.pipeline.plan import EditOptions
from kvfix.pipeline.quality import ProbeResult, Quality


def lacking(quality: Quality, options: EditOptions) -> str | None:
    """What the quality lacks of what was asked for; None where it will do.

    Where the repair is to escalate, a probe of replaced text that prefers the old answer is not enough, unless
    the fresh cache prefers it too; an MR that cannot be measured is no reason to spend more.
    """
    wanted, found = options.min_mr, quality.mr_median
    escalates = options.on_low == "escalate"
    if wanted is not None and (found is None or found < wanted) and not (found is None and escalates):
        shown = "not measurable" if found is None else f"{found:.3f}"
        return f"the median MR is {shown}, and at least {wanted:g} was asked for"
    failing = sum(_prefers_old(probe) for probe in quality.probes) if escalates else 0
    return f"{failing} of {len(quality.counting)} probes preferred the old text" if failing else None


def warnings_of(quality: Quality) -> Sequence[str]:
    """What nobody should overlook."""
    said = []
    counting = quality.counting
    # what a fresh cache gets wrong too is the model's limit, not the repair's
    able = [p for p in counting if p.margin_fresh is None or p.margin_fresh > 0]
    old = sum(not p.prefers_new for p in able)
    if old:
        said.append(f"on {old} of {len(able)} probes the repaired cache still prefers the old text")
    worse = sum(p.mr is not None and p.mr < 0 for p in counting)
    if worse:
        said.append(f"on {worse} of {len(counting)} probes the repaired cache is worse than the stale one")
    return said


def _prefers_old(probe: ProbeResult) -> bool:
    """Whether an automatic probe of replaced text still prefers the old one, and a fresh cache is not known to."""
    able = probe.margin_fresh is None or probe.margin_fresh > 0
    return probe.kind == "auto" and bool(probe.old and probe.new) and not probe.prefers_new and able
