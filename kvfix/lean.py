"""A lean start: what a forward pass never uses is not imported with torch and transformers.

transformers' modelling code imports what training, compiling and running on many machines need - torch's compiler, its
distributed tensors, scipy -, half the time of a cold command. It does without them where they are missing, so here they
are said to be missing; the compiler, which torch always has, comes when it is first used. A process whose other code
may want them must not be treated so: only the command line, whose process is its own, asks.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

Made = TypeVar("Made")

# not accelerate: GGUF files are not converted without it
UNUSED = ("is_scipy_available", "is_torch_distributed_available")
MODELLING = ("transformers.modeling_utils", "transformers.generation.utils")

_wanted = False


def want() -> None:
    """Start this process lean: it is the command line's own."""
    global _wanted
    _wanted = True


@contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage meanwhile: importing and loading make hundreds of thousands of objects that stay."""
    if not (_wanted and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # what has been made is here to stay: no later collection looks at it
        gc.freeze()
        gc.enable()


def loaded(load: Callable[[], Made]) -> Made:
    """What `load` makes: a model, on torch's device without storage until its weights are taken from their files."""
    if _wanted:
        # a model that will not be made so is made as elsewhere, and what is wrong with it is said then
        with suppress(Exception), undisturbed(), _without_drawing():
            return load()
    return load()


def _without_drawing() -> Any:
    """Spare what torch computes in Python where there is no storage: random weights, and positions."""
    import torch
    from torch.nn import init
    from torch.overrides import TorchFunctionMode

    class WithoutDrawing(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            if function in (init.kaiming_uniform_, init.normal_, init.uniform_):
                tensor = args[0] if args else given["tensor"]
                if tensor.is_meta:
                    return tensor
            # of what follows, shape and dtype and no more
            if function is torch.arange and torch.device(given.get("device") or "cpu").type == "meta":
                return function(*args, **{**given, "device": "cpu"}).to("meta")
            if function is torch.empty_like and args and args[0].is_meta and args[0].is_contiguous():
                return torch.empty(args[0].shape, **{"dtype": args[0].dtype, "device": "meta", **given})
            if function in arithmetic and any(getattr(each, "is_meta", False) for each in args):
                return function(*map(somewhere, args), **given).to("meta")
            return function(*args, **given)

    # what rotary frequencies are made with: torch would import sympy to work it out
    owned = ("div", "pow", "__truediv__", "__rtruediv__", "__rdiv__", "__pow__", "__rpow__")
    arithmetic = {torch.div, torch.pow, *(getattr(torch.Tensor, name) for name in owned)}

    def somewhere(each: Any) -> Any:
        return torch.ones(each.shape, dtype=each.dtype) if getattr(each, "is_meta", False) else each

    return WithoutDrawing()


def import_modelling() -> None:
    """Import transformers' modelling code, lean where that is wanted; call before the engine is imported."""
    if not _wanted or "transformers" in sys.modules:
        return
    with undisturbed():
        sys.meta_path.insert(0, _Submodules)
        _defer(COMPILER, LIGHT)
        try:
            _say_missing()
            for name in MODELLING:
                importlib.import_module(name)
        except Exception:
            # a release that needs more than those before it: let it have everything
            _forget()


# ---- what is said to be missing


def _say_missing() -> None:
    """Have transformers answer from now on that it lacks what is unused."""
    for home in ("transformers.utils.import_utils", "transformers.utils"):
        module = importlib.import_module(home)
        for name in UNUSED:
            if hasattr(module, name):
                setattr(module, name, _never)


def _never() -> bool:
    return False


# ---- what comes when it is first used


class Deferred(ModuleType):
    """Stands in for a module that is imported when more of it is asked for than the `light` part."""

    def __getattr__(self, name: str) -> Any:
        # the import system and `inspect` look for names like this one in every module
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Submodules:
    """Finds modules below one that is deferred, having imported that one before: it may have imported them too."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        above = name.rpartition(".")[0]
        if not isinstance(sys.modules.get(above), Deferred) or name in ALONE:
            return None
        _real(above)
        return importlib.util.spec_from_loader(name, _AsItIs()) if name in sys.modules else None


class _AsItIs(Loader):
    """Takes a module that has been imported by now."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


def _real(name: str) -> ModuleType:
    """The module itself, imported now if a stand-in has kept its place."""
    if isinstance(sys.modules.get(name), Deferred):
        _withdraw(name)
    return importlib.import_module(name)


def _withdraw(name: str) -> None:
    parent, _, own = name.rpartition(".")
    del sys.modules[name]
    vars(sys.modules[parent]).pop(own, None)


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator for the compiler's eyes, with or without arguments: nothing is compiled here."""
    return function if callable(function) else _unmarked


COMPILER = "torch._dynamo"
ALONE = (f"{COMPILER}._trace_wrapped_higher_order_op",)  # does without what it belongs to
MARKS = ("allow_in_graph", "assume_constant_result", "disable")
LIGHT = dict.fromkeys(MARKS, _unmarked)


def _defer(name: str, light: dict[str, Any]) -> None:
    """Put a stand-in where the module will be, its submodules within reach."""
    parent, _, own = name.rpartition(".")
    spec = importlib.util.find_spec(name)
    if spec is None or name in sys.modules:
        return
    stand_in = Deferred(name)
    vars(stand_in).update(light, __spec__=spec, __file__=spec.origin)
    if spec.submodule_search_locations:
        stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = stand_in
    setattr(sys.modules[parent], own, stand_in)


def _forget() -> None:
    """As if nothing of transformers had been imported, and nothing deferred."""
    if isinstance(sys.modules.get(COMPILER), Deferred):
        _withdraw(COMPILER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
