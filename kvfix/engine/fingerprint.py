"""What a model's bytes are: content fingerprints of its folder, hashed once and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, remembered by path, size, modification time and inode."""
    from kvfix.engine.locate import cache_folder

    memo = cache_folder() / "fingerprints.json"
    stat = path.stat()
    facts = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    known = _read(memo)
    entry = known.get(str(path.resolve()))
    if entry and entry[:3] == facts:
        return str(entry[3])
    with path.open("rb") as file:
        digest = _sha256(file)
    known = {**_read(memo), str(path.resolve()): [*facts, digest]}
    _write(memo, known)
    return digest


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 22):
        digest.update(block)
    return digest.hexdigest()


def _read(memo: Path) -> dict[str, list]:
    try:
        known = json.loads(memo.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(memo: Path, known: dict[str, list]) -> None:
    """Best effort: a memo that cannot be written only costs the next hash."""
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=memo.parent, prefix=".fingerprints-")
        with os.fdopen(handle, "w") as file:
            json.dump(known, file)
        os.replace(scratch, memo)
    except OSError:
        return


def weights_digest(folder: Path) -> str:
    """Of all safetensors files in a folder, names included."""
    return _digest_of([[path.name, file_digest(path)] for path in sorted(folder.glob("*.safetensors"))])


def folder_digest(folder: Path) -> str:
    """Of every file of a model, whatever it is for: what loading the folder again would make of it."""
    return _digest_of([[path.name, file_digest(path)] for path in sorted(folder.iterdir()) if path.is_file()])


def adapter_digest(folder: Path) -> str:
    """Of an adapter's config ('' where there is none; its weights count with the others)."""
    config = folder / "adapter_config.json"
    return file_digest(config) if config.is_file() else ""


def config_digest(folder: Path) -> str:
    """Of config.json without what does not change a number."""
    config = json.loads((folder / "config.json").read_text())
    return _digest_of({key: value for key, value in config.items() if key not in VOLATILE})


def rope_text(folder: Path) -> str:
    """The config's rotary parameters, readable."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    return json.dumps({name: config[name] for name in names if config.get(name) is not None}, sort_keys=True)


def tokenizer_digest(folder: Path) -> str:
    """Of the tokenizer's files; the chat template counts with the context template instead."""
    files: list[list[Any]] = []
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            files.append([name, file_digest(path)])
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        kept = json.loads(settings.read_text())
        kept.pop("chat_template", None)
        files.append([settings.name, kept])
    return _digest_of(files)


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
