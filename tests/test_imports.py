"""Imports point one way, heavy libraries have one home each, and only the command line prints."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfix

ROOT = Path(kvfix.__file__).parent

# a part may import itself and parts of lower levels; parts of one level do not know each other
LEVELS = [
    {"errors", "core", "lean"},
    {"config", "cost", "debt", "diff", "jsonlines", "metrics", "ops", "pages"},
    {"align"},
    {"engine", "store", "corpus", "probes"},
    {"selectors"},
    {"pipeline"},
    {"bench"},
    {"api"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
HOME = {"transformers": "engine", "safetensors": "store", "sqlalchemy": "store", "rich": "cli", "typer": "cli"}


def part_of(path: Path) -> str:
    """`engine` for kvfix/engine/load.py, `diff` for kvfix/diff.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """Full names of everything imported anywhere in a file of `package`, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def faults(path: Path, source: str) -> list[str]:
    part, tree = part_of(path), ast.parse(source)
    if part not in LEVEL:
        return [f"{part} has no place among the levels"]
    found = []
    for name in imported(tree, ["kvfix", *path.relative_to(ROOT).parts[:-1]]):
        top, *rest = name.split(".")
        if HOME.get(top, part) != part:
            found.append(f"{part} imports {top}")
        # `from kvfix import X` may name the public API, which stands above every part
        target = (rest[0] if rest and rest[0] in LEVEL else "__init__") if top == "kvfix" else part
        if target != part and LEVEL[target] >= LEVEL[part]:
            found.append(f"{part} imports {name}")
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and part != "cli")
    return found + [f"{part} prints" for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    assert faults(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("core.py", "from kvfix.errors import UsageError", ["core imports kvfix.errors.UsageError"]),
        ("diff.py", "from .corpus import scan", ["diff imports kvfix.corpus.scan"]),
        ("diff.py", "def f():\n from kvfix import Store", ["diff imports kvfix.Store"]),
        ("engine/load.py", "from kvfix.store.store import Store", ["engine imports kvfix.store.store.Store"]),
        ("engine/load.py", "from ..store import Store", ["engine imports kvfix.store.Store"]),
        ("store/store.py", "def f():\n import kvfix.engine", ["store imports kvfix.engine"]),
        ("selectors/base.py", "from kvfix import pipeline", ["selectors imports kvfix.pipeline"]),
        ("bench/run.py", "import kvfix.cli.app", ["bench imports kvfix.cli.app"]),
        ("pipeline/ask.py", "from transformers.cache_utils import Cache", ["pipeline imports transformers"]),
        ("bench/plots.py", "import rich.table", ["bench imports rich"]),
        ("pipeline/sync.py", "print(1)", ["pipeline prints"]),
        ("novelty.py", "", ["novelty has no place among the levels"]),
        ("engine/load.py", "from .text import Text\nimport transformers\nfrom kvfix.ops import rotate_keys", []),
        ("pipeline/edit.py", "from kvfix import align, debt\nfrom kvfix.engine import Engine", []),
        ("cli/app.py", "import rich, typer, kvfix\nprint(1)", []),
    ],
)
def test_the_rules_can_be_broken(file, source, expected):
    assert faults(ROOT / file, source) == expected


LIGHT = [
    "config",
    "diff",
    "corpus",
    "probes",
    "metrics",
    "store",
    "selectors",
    "pipeline.plan",
    "pipeline.status",
    "pipeline.changes",
    "pipeline.sync",
    "pipeline.refresh",
    "cli.app",
]


def test_light_modules_import_no_heavy_library():
    """What `status`, `diff` and an idle `sync` need: one process, so the first offender is named."""
    present = [name for name in LIGHT if (ROOT / f"{name.replace('.', '/')}.py").exists() or (ROOT / name).is_dir()]
    code = (
        "import importlib, sys\n"
        f"for name in {present}:\n"
        "    importlib.import_module('kvfix.' + name)\n"
        "    heavy = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'kvfix.{name} imports {sorted(heavy)}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
