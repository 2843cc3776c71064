"""What doctor tells of the machine, the libraries and the place of the store."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvfix


def environment() -> dict[str, Any]:
    """Versions, devices, threads, memory and the cache folder."""
    import psutil
    import torch

    from kvfix.engine.locate import cache_folder

    devices = [f"cuda:{n} {torch.cuda.get_device_name(n)}" for n in range(torch.cuda.device_count())]
    memory = psutil.virtual_memory()
    return {
        "kvfix": kvfix.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "devices": ["cpu", *devices],
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "cache_folder": str(cache_folder()),
        "demo_model": demo_model(),
    }


def demo_model() -> str | None:
    """Where the demo model lies; None where it still has to be fetched."""
    from kvfix.engine.locate import demo_file
    from kvfix.errors import UnknownModelError

    try:
        return str(demo_file())
    except UnknownModelError:
        return None


def place_facts(store: str) -> dict[str, Any]:
    """The store's directory as the system sees it; the nearest existing one where it is not there yet."""
    from kvfix.store.place import place_of, try_locks

    path = Path(store).absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    place, locks = place_of(nearest), try_locks(path / "tmp")
    return {
        "path": str(path),
        "readable": os.access(nearest, os.R_OK | os.X_OK),
        "writable": os.access(nearest, os.W_OK | os.X_OK),
        "free_bytes": shutil.disk_usage(nearest).free,
        "file_system": place.kind,
        "network": place.family is not None,
        "locks": locks and vars(locks),  # None: could not be tried, for want of a store or of a right to write there
        "notes": [*(locks.notes() if locks else ()), *place.notes()],
    }
