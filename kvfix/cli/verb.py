"""Turns a verb's story into a command: shared options in, settings and output ready, one exit code out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from kvfix import lean
from kvfix.cli.options import parameters, place
from kvfix.cli.output import Output
from kvfix.config import Settings, find_config, load_settings

if TYPE_CHECKING:
    from kvfix.api import KVFix
    from kvfix.engine import Engine

Story = Callable[..., int | None]


def open_engine(model: str | None, **how: Any) -> Engine:
    """`Engine.open`, torch and transformers being imported when it is called."""
    from kvfix.engine import Engine

    return Engine.open(model, **how)


@dataclass(frozen=True)
class Shell:
    """What every verb of one call is given: its output, and how it comes by an engine."""

    out: Output
    open_engine: Callable[..., Engine] = open_engine


@dataclass(frozen=True)
class Run:
    """One call of a verb: its settings, its output, and how it comes by an engine."""

    settings: Settings
    out: Output
    open_engine: Callable[..., Engine] = open_engine

    @contextmanager
    def open(self, *, create: bool = False, read_only: bool = False) -> Iterator[KVFix]:
        """The store; the model is opened when it is first needed, and said to be the demo model where it is."""
        from kvfix.api import KVFix
        from kvfix.store import Store

        with Store.open(self.settings.store, create=create, read_only=read_only, keep=self.settings.keep) as store:
            yield KVFix(store, self.engine)

    def engine(self) -> Any:
        """The model, its tokenizer loaded."""
        lean.import_modelling()
        from kvfix.engine.locate import DEMO_NAME

        given = self.settings
        if given.model is None:
            self.out.note(f"no --model given: using the demo model, {DEMO_NAME}")
        return self.open_engine(
            given.model, device=given.device, dtype=given.dtype, template=given.template, notify=self.out.note
        )

    def writing(self, kv: KVFix, name: str, unless: bool = False) -> AbstractContextManager[None]:
        """Hold the store's writer lock, unless nothing will be written; say what it is worth where that is in doubt."""
        if unless:
            return nullcontext()
        self._look_at(kv.store.path)
        return kv.store.writing(name, self.settings.lock_timeout)

    def _look_at(self, store: Path) -> None:
        from kvfix.store.place import place_of, try_locks

        notes = place_of(store).notes()
        if not notes:
            return
        for line in notes:
            self.out.warn(line)
        locks = try_locks(store / "tmp")
        for line in locks.notes() if locks else ():
            self.out.complain(f"warning: {line}")
            self.out.log("warning", "warning", message=line)


class Command(NamedTuple):
    """What typer is given of a verb."""

    name: str
    call: Callable[..., int]
    example: str

    def join(self, app: typer.Typer) -> None:
        """Make it a command of an application."""
        app.command(self.name, epilog=f"[dim]Example:[/dim] {self.example}")(self.call)


def verb(*groups: dict[str, Any], example: str) -> Callable[[Story], Command]:
    """Make a command of a story `(run, own arguments) -> exit code`, with the options of `groups` besides its own."""

    def command_of(story: Story) -> Command:
        own = list(inspect.signature(story, eval_str=True).parameters.values())[1:]
        shared = [parameter for group in groups for parameter in parameters(group)]

        def call(ctx: typer.Context, **given: Any) -> int:
            shell: Shell = ctx.obj
            out = shell.out
            out.json, out.quiet = given.pop("json"), given.pop("quiet")
            mine = {parameter.name: given.pop(parameter.name) for parameter in own}
            given.pop("serve", None)  # the command has come where it was to run
            config = given.pop("config") or _config_near(mine)
            logs = "log_format" in given
            settings = load_settings(given, config_file=config)
            out.logs = logs and settings.log_format == "json"
            return story(Run(settings, out, shell.open_engine), **mine) or 0

        # typer reads the signature: the story's own parameters, then the shared ones
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        ordered = sorted([*keyword, *shared], key=place)
        call.__signature__ = inspect.Signature([context, *ordered])  # type: ignore[attr-defined]
        call.__annotations__ = {}
        call.__doc__ = _paragraphs(inspect.getdoc(story) or "")
        return Command(story.__name__, call, example)

    return command_of


def _paragraphs(text: str) -> str:
    """Each paragraph on one line, for the help to wrap."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _config_near(mine: dict[str, Any]) -> Path | None:
    """The kvfix.toml above the corpus that the command names, else above the working directory."""
    named = [*(mine.get("paths") or ()), mine.get("path"), mine.get("doc")]
    starts = [Path(each) for each in named if each is not None and Path(each).exists()]
    found = (find_config(start) for start in [*starts, Path()])
    return next((config for config in found if config is not None), None)
