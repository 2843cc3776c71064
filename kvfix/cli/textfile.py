"""Figures of a pass for Prometheus' textfile collector, whole at every moment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

Samples = Mapping[str, float]  # by label set, '' for none

# name → help; all of them gauges, for a pass starts from nothing
FAMILIES = {
    "kvfix_documents": "Documents by state after the last pass.",
    "kvfix_stale_rows": "Rows that do not equal a fresh prefill's.",
    "kvfix_sync_documents": "Documents of the last pass by outcome.",
    "kvfix_sync_failures": "Documents that the last pass could not do.",
    "kvfix_sync_escalated": "Repairs of the last pass that were given more rows.",
    "kvfix_sync_mr_sample_median": "Median margin recovery of the sampled repairs of the last pass.",
    "kvfix_sync_last_run_timestamp_seconds": "When the last pass ended.",
    "kvfix_sync_duration_seconds": "How long the parts of the last pass took.",
}


def lines(figures: Mapping[str, Samples]) -> Iterator[str]:
    """The exposition format, family by family."""
    for name, text in FAMILIES.items():
        samples = figures.get(name, {})
        if samples:
            yield f"# HELP {name} {text}\n# TYPE {name} gauge\n"
            yield from (f"{name}{labels} {value:.17g}\n" for labels, value in samples.items())


def labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    """Samples that differ in one label; its values are plain words."""
    return {f'{{{label}="{word}"}}': value for word, value in values.items()}


def write(path: Path, figures: Mapping[str, Samples]) -> str | None:
    """Put the figures in the place of the file; what went wrong, if anything did."""
    try:
        # a name that the collector, which takes *.prom, does not see
        descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.writelines(lines(figures))
                file.flush()
                os.fchmod(descriptor, 0o666 & ~_umask())
                os.fsync(descriptor)
            os.replace(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        return f"cannot write {path}: {error.strerror or error}"
    return None


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
