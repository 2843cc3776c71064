"""Every option, declared once. What is not given is None: settings fill it in, and the defaults shown are theirs."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from kvfix.config import LOG_FORMATS, ON_LOW, STRATEGIES, Settings
from kvfix.core import ADAPTIVE, DEFAULT_SELECTOR
from kvfix.errors import UsageError

REPAIR = "What to recompute"
CHECKS = "What to check"
PASS = "How far to go, and whom to tell"
BENCH = "What to measure"
ITEMS = "What to generate"
DOCUMENTS = "Which documents"
MODEL = "Model"
DAEMON = "The daemon"
COMMON = "Store and output"


def option(name: str, text: str, panel: str, *, default: object = None, least: int | None = None, **more: Any) -> Any:
    """An option's declaration; the default stands in the text, for that of a setting is decided later."""
    shown = f"{text} [dim]\\[default: {default}][/dim]" if default is not None else text
    return typer.Option(name, help=shown, rich_help_panel=panel, show_default=False, min=least, **more)


def rows(text: str) -> int | str:
    """A whole number, or `ADAPTIVE`. Raises `BadParameter`."""
    try:
        return text if text == ADAPTIVE else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor {ADAPTIVE!r}.") from None


def flag(name: str, text: str, panel: str) -> Any:
    """A switch that is off unless given."""
    return typer.Option(name, help=text, rich_help_panel=panel, metavar="", show_default=False)


def argument(metavar: str, text: str) -> Any:
    return typer.Argument(help=text, metavar=metavar, show_default=False)


Paths = Annotated[list[Path], argument("PATH...", "Directories to walk, or single files.")]
Doc = Annotated[str, argument("DOC", "A document: its path, or its name in the store.")]
Below = Annotated[Path | None, argument("\\[PATH]", "Only the documents below this path.")]
Question = Annotated[str, argument("QUESTION", "Put verbatim if it begins with a space, else into the template.")]

Include = Annotated[
    list[str] | None,
    option("--include", "Patterns of names to take; may be repeated.", DOCUMENTS, default=" ".join(Settings.include)),
]
Exclude = Annotated[list[str] | None, option("--exclude", "Patterns of names or paths to leave out.", DOCUMENTS)]
Force = Annotated[bool, flag("--force", "Also what is unchanged, and what another model built.", DOCUMENTS)]
OfDoc = Annotated[str, option("--doc", "The document to answer from: its path, or its name.", DOCUMENTS, metavar="DOC")]
StaleOk = Annotated[bool, flag("--stale-ok", "Answer though the file has changed or is gone.", DOCUMENTS)]
TextFrom = Annotated[
    str | None,
    option("--text", "Take the new text from this file, - for standard input.", DOCUMENTS, metavar="FILE|-"),
]

Selector = Annotated[
    str | None,
    option("--selector", "Which rows behind the edit.", REPAIR, default=Settings.selector, metavar="NAME"),
]
K = Annotated[
    str | None,
    option(
        "--k",
        "Rows per edited span, or adaptive: more where more text stands behind the edit.",
        REPAIR,
        default=Settings.k,
        metavar="ROWS|adaptive",
        parser=rows,
    ),
]
BudgetRows = Annotated[int | None, option("--budget", "At most so many rows in all.", REPAIR, metavar="ROWS")]
Seed = Annotated[int | None, option("--seed", "For selectors that draw.", REPAIR, default=Settings.seed, metavar="N")]
Query = Annotated[
    str | None,
    option("--query", "For selectors that look with a question.", REPAIR, default="a probe's", metavar="QUESTION"),
]
Strategy = Annotated[
    str | None,
    option(
        "--strategy",
        f"{', '.join(STRATEGIES)}: re-prefill where that is no dearer, or one of them.",
        REPAIR,
        default=Settings.strategy,
        metavar="NAME",
    ),
]

ProbesFile = Annotated[
    Path | None,
    option("--probes", "Questions to ask, one JSON object a line.", CHECKS, default="probes.jsonl", metavar="FILE"),
]
NoVerify = Annotated[bool, flag("--no-verify", "Leave out the fresh prefill that the repair is compared with.", CHECKS)]
Undo = Annotated[bool, flag("--undo", "Go back to the version before, whatever the file says.", DOCUMENTS)]
Measure = Annotated[bool, flag("--measure", "Time repair, suffix and full prefill several times over.", CHECKS)]
MinMr = Annotated[float | None, option("--min-mr", "Lowest median margin recovery.", CHECKS, metavar="X")]
OnLow = Annotated[
    str | None,
    option("--on-low", f"Below it: {', '.join(ON_LOW)}.", CHECKS, default=Settings.on_low, metavar="WHAT"),
]

Compare = Annotated[bool, flag("--compare", "Answers of the previous, the current and a fresh cache.", CHECKS)]
MaxNew = Annotated[int, option("--max-new", "Longest answer.", CHECKS, default=64, metavar="TOKENS", least=1)]
MaxSize = Annotated[
    str | None,
    option(
        "--max-size",
        "Drop previous versions, the oldest first, until segments and records take no more: 500MB, 20GB.",
        CHECKS,
        metavar="SIZE",
    ),
]
Rebuild = Annotated[bool, flag("--rebuild", "Make the manifest anew from the version records.", CHECKS)]
Deep = Annotated[bool, flag("--deep", "Also compare caches with a fresh prefill.", CHECKS)]
Sample = Annotated[int, option("--sample", "How many of them.", CHECKS, default=5, metavar="N", least=1)]
MinAge = Annotated[
    str, option("--min-age", "Leave files younger than this: 90s, 10m, 1h, 2d.", CHECKS, default="1h", metavar="TIME")
]

Prune = Annotated[bool, flag("--prune", "Drop the caches of documents whose files are gone.", DOCUMENTS)]
AllowEmpty = Annotated[
    bool, flag("--allow-empty", "Take a known corpus that is missing or empty for removed.", DOCUMENTS)
]
Order = Annotated[
    str,
    option(
        "--order",
        "priority (changed before new, small before large) or size.",
        DOCUMENTS,
        default="priority",
        metavar="NAME",
    ),
]
VerifySample = Annotated[
    float,
    option("--verify-sample", "Share of repairs compared with a fresh prefill.", CHECKS, default=0.05, metavar="X"),
]
LeastMr = Annotated[
    float | None,
    option("--min-mr", "Below it a sampled repair takes more rows.", CHECKS, default=0.9, metavar="X"),
]
PassBudget = Annotated[
    str | None, option("--time-budget", "Begin no document after this: 90s, 10m, 1h.", PASS, metavar="TIME")
]
RefreshBudget = Annotated[
    str | None, option("--refresh-budget", "Then refresh for so long the documents with debt.", PASS, metavar="TIME")
]
Memory = Annotated[
    str | None,
    option(
        "--memory",
        "Rows that are computed or wait to be stored at a time: 500MB, 2GB. One document is always allowed.",
        PASS,
        default="a quarter of the free memory",
        metavar="SIZE",
    ),
]
MaxDocuments = Annotated[int | None, option("--max", "At most so many documents.", PASS, metavar="N", least=1)]
MinDebt = Annotated[
    int, option("--min-debt", "Only documents with so many stale rows.", PASS, default=1, metavar="ROWS", least=1)
]
Hook = Annotated[
    str | None,
    option(
        "--hook",
        "Run this when documents have changed, their names on its standard input.",
        PASS,
        metavar="COMMAND",
    ),
]
MetricsFile = Annotated[
    Path | None, option("--metrics", "Write figures for Prometheus to this file.", PASS, metavar="FILE.prom")
]

Store = Annotated[
    str | None, option("--store", "The store, or KVFIX_STORE.", COMMON, default=Settings.store, metavar="DIR")
]
Keep = Annotated[
    int | None, option("--keep", "Previous versions to leave of each document.", COMMON, default=1, metavar="N")
]
LockTimeout = Annotated[
    float | None,
    option(
        "--lock-timeout", "Wait for another writer.", COMMON, default=f"{Settings.lock_timeout:g}", metavar="SECONDS"
    ),
]
ConfigFile = Annotated[
    Path | None, option("--config", "Settings.", COMMON, default="kvfix.toml, found upward", metavar="FILE")
]
DryRun = Annotated[bool, flag("--dry-run", "Say what would be done and do nothing.", COMMON)]
LogFormat = Annotated[
    str | None,
    option(
        "--log-format",
        f"{', '.join(LOG_FORMATS)}: lines on standard error for people, or one JSON object each.",
        COMMON,
        default=Settings.log_format,
        metavar="NAME",
    ),
]
Json = Annotated[bool, flag("--json", "One JSON document on standard output.", COMMON)]
Quiet = Annotated[bool, flag("--quiet", "Print nothing on success.", COMMON)]

Serve = Annotated[bool, flag("--serve", "Run at the daemon that kvfix serve is, or KVFIX_SERVE=1.", MODEL)]
Socket = Annotated[
    Path | None,
    option(
        "--socket",
        "Where clients find it, or KVFIX_SERVE.",
        DAEMON,
        default="kvfix/serve.sock in the user's runtime folder",
        metavar="FILE",
    ),
]
IdleTimeout = Annotated[
    str,
    option(
        "--idle-timeout",
        "End when no command has come for so long: 90s, 15m, 8h.",
        DAEMON,
        default="never",
        metavar="TIME",
    ),
]
MaxModels = Annotated[int, option("--max-models", "Models to keep loaded.", DAEMON, default=1, metavar="N", least=1)]
DaemonStatus = Annotated[bool, flag("--status", "Say what the daemon does, and start none.", DAEMON)]
Stop = Annotated[bool, flag("--stop", "Have the daemon end after the command it is at.", DAEMON)]

Model = Annotated[
    str | None,
    option(
        "--model",
        "Folder, .gguf file or hub name, or KVFIX_MODEL.",
        MODEL,
        default="the demo model",
        metavar="NAME|DIR|FILE",
    ),
]
Device = Annotated[
    str | None, option("--device", "auto, cpu or cuda:N.", MODEL, default=Settings.device, metavar="NAME")
]
Dtype = Annotated[
    str | None,
    option("--dtype", "auto, float32, bfloat16, float16.", MODEL, default=Settings.dtype, metavar="NAME"),
]
Template = Annotated[
    str | None,
    option(
        "--template",
        "plain, auto, or text with {document} and {question}.",
        MODEL,
        default=Settings.template,
        metavar="TEXT",
    ),
]

Contexts = Annotated[str, option("--context", "Lengths of the text.", BENCH, default="4096", metavar="TOKENS,...")]
Ks = Annotated[str, option("--k", "Rows per edited span.", BENCH, default="32", metavar="ROWS,...")]
Spans = Annotated[str, option("--span", "Lengths of the edit.", BENCH, default="1", metavar="TOKENS,...")]
EditAt = Annotated[
    str, option("--edit-at", "Where it is, as fractions of the text.", BENCH, default="0.33", metavar="X,...")
]
Rounds = Annotated[
    int, option("--rounds", "Timed rounds after one to warm up.", BENCH, default=5, metavar="N", least=1)
]
DocumentsAPass = Annotated[
    str, option("--documents", "Documents in one pass.", BENCH, default="1,4,16,64", metavar="N,...")
]
Context = Annotated[int, option("--context", "Length of a text.", BENCH, default=1024, metavar="TOKENS", least=64)]
PatchRows = Annotated[int, option("--k", "Rows that a patch writes.", BENCH, default=32, metavar="ROWS", least=5)]
Files = Annotated[int, option("--documents", "Unchanged files of a pass.", BENCH, default=100, metavar="N", least=1)]
KRows = Annotated[int, option("--k", "Rows per edited span.", BENCH, default=32, metavar="ROWS", least=0)]
ItemsFile = Annotated[Path | None, option("--items", "Items, one JSON object a line.", BENCH, metavar="FILE.jsonl")]
Selectors = Annotated[
    str | None,
    option("--selectors", "Ways of choosing rows.", BENCH, default="all deployable", metavar="NAME,..."),
]
RecordsFile = Annotated[
    Path | None, option("--out", "Where records go; what it holds already is not run again.", BENCH, metavar="FILE")
]
Limit = Annotated[int | None, option("--limit", "Only the first items.", BENCH, metavar="N", least=1)]
Seeds = Annotated[int, option("--seeds", "Draws of each random choice.", BENCH, default=5, metavar="N", least=1)]
Transplant = Annotated[
    int,
    option(
        "--transplant",
        "Kept items whose rows are also copied, not recomputed.",
        BENCH,
        default=0,
        metavar="N",
        least=0,
    ),
]
PlotsDir = Annotated[Path | None, option("--plots", "Draw into this folder, PNG and SVG.", BENCH, metavar="DIR")]
ReportOnly = Annotated[bool, flag("--report-only", "Run nothing: statistics of what --out holds.", BENCH)]

Generate = Annotated[
    str | None,
    option(
        "--generate",
        "Write items of these conditions to --items, and run nothing: direct, derived, distance, chain, implicit.",
        ITEMS,
        metavar="NAME,...",
    ),
]
FillerDir = Annotated[Path | None, option("--filler", "Documents to set the items among.", ITEMS, metavar="DIR")]
Count = Annotated[int, option("--count", "Items of each kind.", ITEMS, default=60, metavar="N", least=1)]
Distances = Annotated[
    str, option("--distances", "From the edit to what depends on it.", ITEMS, default="0", metavar="TOKENS,...")
]
Variant = Annotated[
    str, option("--variant", "same, length (of changing length) or edits (two).", ITEMS, default="same", metavar="NAME")
]
Split = Annotated[str, option("--split", "development or holdout templates.", ITEMS, default="holdout", metavar="NAME")]
ItemContext = Annotated[
    int, option("--context", "Length of the text.", ITEMS, default=1200, metavar="TOKENS", least=200)
]
ItemSeed = Annotated[int, option("--item-seed", "Of what is drawn.", ITEMS, default=0, metavar="N", least=0)]

Git = Annotated[Path, option("--git", "A git repository, or a directory in one.", BENCH, metavar="DIR")]
Tried = Annotated[
    str, option("--selectors", "Ways of choosing rows.", BENCH, default=DEFAULT_SELECTOR, metavar="NAME,...")
]
Budgets = Annotated[
    str, option("--k", "Rows per edited span, or adaptive.", BENCH, default="32", metavar="ROWS|adaptive,...")
]
MaxEdits = Annotated[int, option("--max", "Edits to replay.", BENCH, default=60, metavar="N", least=1)]
MaxTokens = Annotated[
    int, option("--max-tokens", "Pass over longer documents.", BENCH, default=4096, metavar="TOKENS", least=1)
]
TimeBudget = Annotated[
    str | None, option("--time-budget", "Begin no edit after this: 90s, 10m, 1h.", BENCH, metavar="TIME")
]

# groups of options that several verbs share, by the name of the setting
PRINTING = {"config": ConfigFile, "json": Json, "quiet": Quiet}
READING = {"store": Store, **PRINTING}
LOCKING = {"store": Store, "lock_timeout": LockTimeout, **PRINTING}
WRITING = {**LOCKING, "keep": Keep}
ENGINE = {"model": Model, "device": Device, "dtype": Dtype, "template": Template}
PLANNING = {"selector": Selector, "k": K, "budget": BudgetRows, "seed": Seed, "query": Query, "strategy": Strategy}
QUALITY = {"min_mr": MinMr, "on_low": OnLow}
SERVING = {"serve": Serve}
LOGGING = {"log_format": LogFormat}
WALKING = {"include": Include, "exclude": Exclude}
ROWS = {"memory": Memory}


def parameters(group: dict[str, Any]) -> list[Parameter]:
    """The group as parameters of a command: switches off, everything else not given."""
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False if get_args(kind)[0] is bool else None, annotation=kind)
        for name, kind in group.items()
    ]


def place(parameter: Parameter) -> int:
    """Where a parameter stands in the help: arguments first, then panel by panel."""
    panels = (None, DOCUMENTS, REPAIR, BENCH, ITEMS, CHECKS, PASS, DAEMON, MODEL, COMMON)
    return panels.index(parameter.annotation.__metadata__[0].rich_help_panel)


def numbers(option: str, text: str) -> list[int]:
    """`8,32` as whole numbers, each once. Raises `UsageError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers with commas between them")
    return list(dict.fromkeys(int(part) for part in parts))


def fractions(option: str, text: str) -> list[float]:
    """`0.1,0.8` as numbers from 0 to below 1, each once. Raises `UsageError`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= number < 1 for number in found):
        raise UsageError(f"{option} {text}: expected fractions from 0 to below 1 with commas between them")
    return list(dict.fromkeys(found))
