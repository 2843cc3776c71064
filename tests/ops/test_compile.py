"""Every kernel compiles for a Hopper GPU, as a machine with one will compile it, and no register spills.

It needs no GPU. KVFIX_LONG=1 only: compiling takes seconds a variant.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.devices import LONG

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not LONG, reason="KVFIX_LONG=1 compiles")

# in a process that does not interpret: types by argument, sizes as the launchers choose them
CODE = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INT32 = {"positions", "key_positions", "items", "tiles", "layers"}
INT64 = {"documents", "part_of_row", "slots", "moved"}
FP32 = {"partial", "cos", "sin"}

def compiled(fn, dtype, sizes, num_warps=4, num_stages=3):
    signature, attrs, constants = {}, {}, dict(sizes)
    for place, name in enumerate(fn.arg_names):
        if name in sizes:
            signature[name] = "constexpr"
        elif name.endswith("_step"):
            signature[name], constants[name] = "constexpr", 1
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        elif name in POINTERS:
            kind = "i32" if name in INT32 else "i64" if name in INT64 else "fp32" if name in FP32 else dtype
            signature[name], attrs[(place,)] = "*" + kind, [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run([CUOBJDUMP, how, file.name], capture_output=True, text=True, check=True).stdout
            for how in ("--dump-resource-usage", "--dump-sass")
        )
    counts = used.count("STACK:0 "), code.count("HGMMA"), code.count("LDGSTS.E.BYPASS")
    print(fn.__name__, dtype, made.metadata.shared, *counts)

POINTERS = INT32 | INT64 | FP32 | {"query", "out", "sinks", "keys", "values", "source", "one", "other"}
"""

ATTENTION = """
from kvfix.ops.positional_attention.kernel import _attend, _join
from kvfix.ops.positional_attention.tiles import choose_tiling

for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
    for cells, dim, flags in (
        (140, 128, {}), (140, 256, {"SOFTCAP": True, "WINDOW": True}), (4, 64, {"SINKS": True}),
        (4096, 128, {"SPLIT": False}), (32, 80, {"KEY_POSITIONS": True}),
    ):
        tiling = choose_tiling(cells, dim, size, 132)
        block = max(16, triton.next_power_of_2(dim))
        shared = dict(GROUPS=4, VALUE_DIM=dim, BLOCK_ROWS=tiling.block_rows, BLOCK_VALUE_DIM=block, SINKS=False)
        sizes = dict(shared, DIM=dim, BLOCK_KEYS=tiling.block_keys, BLOCK_DIM=block, SPLIT=True, WINDOW=False)
        sizes |= dict(SOFTCAP=False, KEY_POSITIONS=False, ALIGNMENT=16 // size, UPCAST=False, STAGES=tiling.num_stages)
        compiled(_attend, dtype, sizes | flags, tiling.num_warps, tiling.num_stages)
        compiled(_join, dtype, shared | {"ROWS": 8} | {k: v for k, v in flags.items() if k == "SINKS"})
"""

ROWS = """
from kvfix.ops.kv_deviation.kernel import _squares
from kvfix.ops.rotate_keys.kernel import _rotate
from kvfix.ops.scatter_kv.kernel import _scatter

FP32 |= {"out"}
for dtype in ("bf16", "fp16", "fp32"):
    for dim in (64, 128, 256):
        compiled(_squares, dtype, dict(DIM=dim, BLOCK_ROWS=16, BLOCK_DIM=dim, ADD=True))
        compiled(_scatter, dtype, dict(
            DIM=dim, VALUE_DIM=dim, BLOCK_HEADS=8, BLOCK_DIM=dim, BLOCK_VALUE_DIM=dim, ALIGNMENT=4
        ))
        for interleaved, gather in ((False, True), (True, False)):
            compiled(_rotate, dtype, dict(
                DIM=dim, PAIRS=dim // 2, BLOCK_ROWS=16, BLOCK_PAIRS=dim // 2, BLOCK_DIM=dim,
                INTERLEAVED=interleaved, GATHER=gather,
            ))
"""


def lines_of(code: str, tmp_path: Path) -> list[list[str]]:
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = tmp_path / "compile.py"  # Triton reads the source of what it compiles
    script.write_text(CODE + code)
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines() if re.match(r"_\w+ ", line)]


def test_attention_compiles(tmp_path):
    """Tensor cores for tiles of 64 rows and more in half precision; asynchronous copies of whole 16 bytes."""
    found = lines_of(ATTENTION, tmp_path)
    assert len(found) == 30
    for name, dtype, shared, unspilled, _, copies in found:
        assert int(unspilled) >= 1, (name, dtype)
        assert int(shared) <= 227 * 1024
        if name == "_attend":
            assert int(copies) > 0, (name, dtype)
    assert sum(int(tensor) > 0 for name, dtype, _, _, tensor, _ in found if dtype != "fp32") >= 6


def test_row_kernels_compile(tmp_path):
    found = lines_of(ROWS, tmp_path)
    assert len(found) == 36
    assert all(int(line[3]) >= 1 for line in found)
