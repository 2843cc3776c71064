"""Loads tokenizer and weights from a local folder; code that comes with a model is never run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvfix import lean
from kvfix.engine import attention, packed
from kvfix.errors import UnknownModelError, UnsupportedModelError, UsageError, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


def resolve_device(choice: str) -> torch.device:
    """`auto`, `cpu` or `cuda[:N]`; raises `UsageError` for a device this machine lacks."""
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(choice)
    except RuntimeError as error:
        raise UsageError(f"unknown device {choice!r}: use auto, cpu or cuda[:N]") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(
            f"no device {choice}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {choice!r} is not supported: use auto, cpu or cuda[:N]")
    return device


def load_config(folder: Path) -> Any:
    """The transformers config. Raises `UnsupportedModelError` for an architecture transformers does not know."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ValueError as error:
        said = first_line(error)
        raise UnsupportedModelError(f"{folder.name}: transformers cannot read the config: {said}") from error


def resolve_dtype(choice: str, config: Any) -> torch.dtype:
    """A named dtype; `auto` is the one the weights were stored in."""
    if choice != "auto":
        if choice not in DTYPES:
            raise UsageError(f"unknown dtype {choice!r}: use auto, {', '.join(DTYPES)}")
        return DTYPES[choice]
    stored: Any = getattr(config, "dtype", None)
    return stored if stored in DTYPES.values() else torch.float32


def load_tokenizer(folder: Path) -> Any:
    """A tokenizer that gives character offsets."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(), lean.undisturbed():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"no tokenizer in {folder}: {first_line(error)}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(f"{folder.name}: its tokenizer gives no character offsets (no tokenizer.json)")
    # documents longer than the context are refused by kvfix, with both counts
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return tokenizer


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, str]:
    """The model in evaluation mode, asking kvfix for attention, and the attention it would use by itself."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            loaded: Any = lean.loaded(
                lambda: AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    trust_remote_code=False,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a damaged file raises what its own library has
        said = first_line(error)
        raise UnsupportedModelError(f"{folder.name}: transformers cannot load the model: {said}") from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers makes them up at random
        raise UnsupportedModelError(f"{folder.name}: its files lack {len(missing)} weights ({missing[0]}, …)")
    model = model.eval().requires_grad_(False).to(device)
    packed.pack_weights(model)
    return model, adopt(model)


def adopt(model: Any) -> str:
    """Make the model ask kvfix for attention, in place; returns what it used before."""
    default = model.config._attn_implementation
    attention.register()
    with quiet_transformers():
        model.set_attn_implementation(attention.NAME)
    if model.config._attn_implementation != attention.NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take its attention from transformers' attention interface"
        )
    return str(default)
