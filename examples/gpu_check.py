"""Are the kernels right on this GPU, and how fast are they and the repairs they serve?

Equality first: each kernel against its twin in three dtypes, then passes of a small random model against a fresh
prefill. Nothing is timed unless all of it holds. Then attention as a share of the copy bandwidth, and repairs of random
models in the shapes of well-known ones against full and suffix re-prefill, of 1 to 64 documents in one pass, run from
Python and replayed as CUDA graphs (KVFIX_CUDA_GRAPHS=1), each again only where recomputing every row equals a prefill
and a replay the pass that it was recorded from. Beside each time stands its share of the roofline: what the counted
bytes and operations take at the best rates of this process. Figures go to standard output as one JSON document, tables
to standard error, both to files with --out; exit code 1 where something is not equal.

    python examples/gpu_check.py --out h200    # h200.json and h200.txt; below 8 minutes on an H200
    python examples/gpu_check.py --tiny        # on a CPU, kernels interpreted: tries the script itself

Needs no network and no weights; of packages torch, transformers, triton, rapidfuzz and psutil, and kvfix installed or
its directory in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_scales import Scale


def run(scale: Scale, budget_s: float) -> dict[str, Any]:
    """Compare, then time what is equal; parts that would begin beyond the budget are named instead."""
    import torch
    from gpu_equality import Findings, check_ops, check_passes, show
    from gpu_graphs import check_graphs
    from gpu_repairs import time_repairs
    from gpu_times import time_ops

    found, start = Findings(), time.monotonic()

    def in_time(part: str) -> bool:
        if time.monotonic() - start > budget_s:
            found.skipped.append(part)
        return part not in found.skipped

    with explicit_kernels(), torch.inference_mode():
        check_ops(scale, found)
        check_passes(scale, found)
        if found.equal:
            graphs = check_graphs(scale, found)
            time_ops(scale, found)
            time_repairs(scale, found, in_time, graphs)
    for line in table(found.figures):
        show(line)
    failed = [check["check"] for check in found.checks if not check["ok"]]
    if failed:
        show(f"not equal, and what depends on it not timed: {'; '.join(failed)}")
    whole = {"equal": found.equal, "checks": found.checks, "figures": found.figures, "skipped": found.skipped}
    return {"schema": "kvfix.gpu_check/1", **versions(scale), **whole, "seconds": time.monotonic() - start}


@contextmanager
def explicit_kernels() -> Iterator[None]:
    """A kernel works or raises: nothing falls back in silence."""
    before = os.environ.get("KVFIX_OPS", "")
    os.environ["KVFIX_OPS"] = "triton"
    try:
        yield
    finally:
        os.environ["KVFIX_OPS"] = before


def versions(scale: Scale) -> dict[str, Any]:
    import torch
    import transformers
    import triton

    device = torch.cuda.get_device_name(0) if scale.device == "cuda" else "cpu, kernels interpreted"
    libraries = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
    return {"device": device, "dtype": str(scale.dtype).removeprefix("torch."), **libraries}


def table(figures: dict[str, Any]) -> Iterator[str]:
    """The figures as lines."""
    if "ops" in figures:
        yield from _op_lines(figures["ops"])
    for row in figures.get("repairs", []):
        if row["equal"]:
            medians = {
                name: value["median"] for name, value in row.items() if isinstance(value, dict) and "median" in value
            }
            yield (
                f"{row['model']:14} {row['context']:6}: full prefill {medians['full_prefill_ms']:8.1f} ms "
                f"({row['full_baseline']}, {row['roofline']['full_prefill']['share']:.0%} of the roofline), repair "
                f"{medians['recompute_ms']:7.2f} ms ({row['roofline']['recompute']['share']:.0%}): "
                f"{medians['speedup_full']:.1f}x; {medians['speedup_suffix']:.1f}x against the suffix"
            )
    for row in figures.get("packed", []):
        if row["equal"]:
            ways = ", ".join(f"{way} {_of_roofline(row[way])}" for way in ("eager", "replayed") if row[way])
            yield f"{row['model']:14} {row['context']:6}: {row['documents']:2} repairs in one pass: {ways}"


def _of_roofline(found: dict[str, Any]) -> str:
    return (
        f"{found['ms']['median']:7.2f} ms ({found['ms_per_document']:.2f} each, {found['share']:.0%} of the roofline, "
        f"bound by {found['bound_by']})"
    )


def _op_lines(ops: dict[str, Any]) -> Iterator[str]:
    yield f"copy: {ops['copy_bytes_per_s'] / 1e12:.2f} TB/s read and written; shape {ops['shape']}"
    rows = [(f"attention {_name(row)}", row) for row in ops["positional_attention"]]
    for name, row in [*rows, *((name, ops[name]) for name in ("scatter_kv", "rotate_keys", "kv_deviation"))]:
        called = f", {row['called_ms']['median']:.3f} ms as called" if "called_ms" in row else ""
        yield f"{name:40} {row['ms']['median']:9.3f} ms: {row['share_of_copy']:6.1%} of the copy's rate{called}"


def _name(row: dict[str, Any]) -> str:
    tiling = "x".join(map(str, row["tiling"].values())) if row["tiling"] else "by PyTorch"
    return tiling + (" (chosen)" if row["chosen"] else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, kernels interpreted, as small as can be")
    parser.add_argument("--time-budget", type=float, default=360, metavar="S", help="begin nothing after S seconds")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.json and the tables as NAME.txt")
    options = parser.parse_args(argv)
    if options.tiny:
        # read when Triton is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch
    from gpu_scales import FULL, SMOKE

    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device here; --tiny runs on the CPU")
    report = run(SMOKE if options.tiny else FULL, options.time_budget)
    print(json.dumps(report))
    if options.out:
        told = f"{report['device']}, {report['dtype']}, torch {report['torch']}, triton {report['triton']}"
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".txt").write_text("\n".join([told, *table(report["figures"])]) + "\n")
    return 0 if report["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
