"""Numbers and texts as people read them."""

from __future__ import annotations

import re
import unicodedata

from kvfix import config
from kvfix.errors import UsageError

NONE = "-"
_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def count(number: int | None, noun: str = "", plural: str | None = None) -> str:
    """`1,024` or, with a noun, `1 row`, `2 rows`."""
    if number is None:
        return NONE
    if not noun:
        return f"{number:,}"
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(num_bytes: int | None) -> str:
    """`812 B`, `1.2 MB`: decimal units, three figures at most."""
    if num_bytes is None:
        return NONE
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def duration(ms: float | None) -> str:
    """`0.31 ms`, `42 ms`, `1.3 s`, `2 min 5 s`."""
    if ms is None:
        return NONE
    if ms < 9.95:
        return f"{ms:.2f} ms" if ms < 0.995 else f"{ms:.1f} ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def figure(value: float | None, form: str = ".2f") -> str:
    if value is None:
        return NONE
    shown = format(value, form)
    # what rounds to nothing has no sign
    return shown if shown.strip("-+0.") else shown.lstrip("-+")


def ratio(value: float | None) -> str:
    """`12x`, `3.4x`, `0.82x`."""
    if value is None:
        return NONE
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x" if value >= 0.995 else f"{value:.2f}x"


def visible(text: str) -> str:
    """The text on one line, with signs for what a terminal would act on."""
    return safe("".join(_SIGNS.get(char, char) for char in text))


def safe(text: str) -> str:
    """The text on its lines, with signs for anything else that a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" or _is_plain(char) else f"\\u{ord(char):04x}" for char in text)


def _is_plain(char: str) -> bool:
    return not unicodedata.category(char).startswith("C") and char not in "\u2028\u2029"


def head(text: str, most: int) -> str:
    """At most `most` characters, the end left out."""
    return text if len(text) <= most else text[: most - 1] + "…"


def tail(text: str, most: int) -> str:
    """At most `most` characters, the beginning left out."""
    return text if len(text) <= most else "…" + text[-(most - 1) :]


def middle(text: str, most: int) -> str:
    """At most `most` characters, the middle left out."""
    left = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - left]}…{text[-left:]}"


def num_bytes(text: str, option: str) -> int:
    """What `500MB`, `20GB`, `1.5 GiB` or a bare number of bytes amounts to. Raises `UsageError`."""
    found = config.num_bytes(text)
    if found is None:
        raise UsageError(f"{option} {text}: expected a size like 500MB or 20GB")
    return found


def seconds(text: str, option: str) -> float:
    """What `90s`, `10m`, `1h`, `2d` or a bare number of seconds amounts to. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found:
        raise UsageError(f"{option} {text}: expected a time like 90s, 10m, 1h or 2d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
