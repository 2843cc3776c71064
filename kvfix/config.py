"""Settings from options, KVFIX_* variables, kvfix.toml and defaults, in this order, as one typed object."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvfix.core import ADAPTIVE, DEFAULT_SELECTOR
from kvfix.errors import UsageError

FILE_NAME = "kvfix.toml"
DEFAULT_INCLUDE = ("*.md", "*.markdown", "*.txt", "*.rst")
DEFAULT_MAX_BYTES = 16 * 2**20
STRATEGIES = ("auto", "repair", "suffix", "full")
ON_LOW = ("exact", "keep", "fail", "escalate")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class Rule:
    """What a setting may be: `accepts` judges a value as the file has it, `typed` makes ours of it.

    `parse` makes one as the file would have it of an environment variable's text.
    """

    expected: str
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Any] = str
    typed: Callable[[Any], Any] = lambda value: value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def _whole(least: int) -> Rule:
    return Rule(f"a whole number, {least} or more", lambda v: type(v) is int and v >= least, int)


def _choice(*allowed: str) -> Rule:
    return Rule(f"one of {', '.join(allowed)}", lambda v: v in allowed)


def _patterns(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def num_bytes(value: Any) -> int | None:
    """The bytes that `500MB`, `20GB`, `1.5 GiB` or a bare number of them stand for; None for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", str(value).strip().lower())
    if not found or isinstance(value, bool):
        return None
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** (" kmgt".index(found[2]) if found[2] else 0))


TEXT = Rule("a text that is not empty", _is_text)
NUMBER = Rule("a number", _is_finite, float, float)
SECONDS = Rule("a number of seconds, 0 or more", lambda v: _is_finite(v) and v >= 0, float, float)
SIZE = Rule("a size like 500MB or 2GB", lambda v: bool(num_bytes(v)), typed=num_bytes)
ROWS = Rule(
    f"a whole number, 0 or more, or {ADAPTIVE}",
    lambda v: v == ADAPTIVE or (type(v) is int and v >= 0),
    lambda text: text if text == ADAPTIVE else int(text),
)
PATTERNS = Rule(
    "a list of file patterns", lambda v: isinstance(v, list | tuple) and all(map(_is_text, v)), _patterns, tuple
)
DEVICE = Rule("auto, cpu or cuda[:N]", lambda v: isinstance(v, str) and bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", v)))


def _setting(default: Any, rule: Rule) -> Any:
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Settings:
    """Every setting. The names are the keys of kvfix.toml and, in capitals after KVFIX_, of the environment."""

    store: str = _setting("cache_store", TEXT)
    model: str | None = _setting(None, TEXT)  # None: the demo model
    device: str = _setting("auto", DEVICE)
    dtype: str = _setting("auto", _choice("auto", "float32", "bfloat16", "float16"))
    template: str = _setting("auto", TEXT)
    selector: str = _setting(DEFAULT_SELECTOR, TEXT)
    k: int | str = _setting(32, ROWS)  # rows a span, or "adaptive"
    budget: int | None = _setting(None, _whole(0))
    seed: int = _setting(0, _whole(0))
    query: str | None = _setting(None, TEXT)
    strategy: str = _setting("auto", _choice(*STRATEGIES))
    include: tuple[str, ...] = _setting(DEFAULT_INCLUDE, PATTERNS)
    exclude: tuple[str, ...] = _setting((), PATTERNS)
    min_mr: float | None = _setting(None, NUMBER)
    on_low: str = _setting("exact", _choice(*ON_LOW))
    keep: int | None = _setting(None, _whole(0))  # None: what the store itself says, 1
    lock_timeout: float = _setting(10.0, SECONDS)
    max_bytes: int = _setting(DEFAULT_MAX_BYTES, _whole(1))
    log_format: str = _setting("text", _choice(*LOG_FORMATS))
    memory: int | None = _setting(None, SIZE)  # None: a quarter of what is free


RULES: dict[str, Rule] = {item.name: item.metadata["rule"] for item in fields(Settings)}


def load_settings(
    options: Mapping[str, Any] | None = None,
    start: str | os.PathLike[str] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge all sources; an option that is None or an empty list, and an empty variable, count as not given.

    The file is `config_file`, else the first kvfix.toml at or above `start` (the working directory by default).
    Relative paths in it are relative to it. Raises UsageError, which names the option, variable or key at fault.
    """
    path = Path(config_file) if config_file is not None else find_config(start)
    return Settings(
        **{
            **(_from_file(path) if path is not None else {}),
            **_from_environment(os.environ if environ is None else environ),
            **_from_options(options or {}),
        }
    )


def find_config(start: str | os.PathLike[str] | None = None) -> Path | None:
    """The nearest kvfix.toml in `start` (or, if that is a file, beside it) or in a directory above."""
    here = Path(start or ".").resolve()
    return next((above / FILE_NAME for above in (here, *here.parents) if (above / FILE_NAME).is_file()), None)


def _from_options(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None and value not in ([], ())}
    for name in given:
        if name not in RULES:
            raise UsageError(_unknown("option", name))
    return {name: _checked(name, value, f"--{name.replace('_', '-')} {value}") for name, value in given.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, rule in RULES.items():
        text = environ.get(f"KVFIX_{name.upper()}", "")
        if not text:
            continue
        try:
            value = rule.parse(text)
        except ValueError:
            value = None
        values[name] = _checked(name, value, f"KVFIX_{name.upper()}={text}")
    return values


def _from_file(path: Path) -> dict[str, Any]:
    table = _read_toml(path)
    for name in table:
        if name not in RULES:
            raise UsageError(f"{path}: {_unknown('key', name)}")
    values = {name: _checked(name, value, f"{path}: {name} = {value!r}") for name, value in table.items()}
    if "store" in values:
        values["store"] = str(path.parent / Path(values["store"]).expanduser())
    if "model" in values:
        values["model"] = _model_beside(path, values["model"])
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def _model_beside(path: Path, model: str) -> str:
    """A model's path, relative to the file; anything else is a name and stays as it is."""
    local = path.parent / Path(model).expanduser()
    return str(local) if local.exists() or model.startswith((".", "~")) or model.endswith(".gguf") else model


def _checked(name: str, value: Any, where: str) -> Any:
    rule = RULES[name]
    if not rule.accepts(value):
        raise UsageError(f"{where}: expected {rule.expected}")
    return rule.typed(value)


def _unknown(kind: str, name: str) -> str:
    from rapidfuzz import process

    near = [match[0] for match in process.extract(name.replace("-", "_"), list(RULES), score_cutoff=70, limit=3)]
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(RULES)}"
    return f"unknown {kind} {name!r}{hint}"
