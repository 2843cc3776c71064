"""A lean start: what a forward pass never uses is not imported with torch and transformers.

transformers' modelling code imports what training, compiling and running on many machines need - torch's compiler with
sympy, its distributed tensors, scipy, accelerate -, half the time of a cold command. It does without them where they
are missing, so here they are said to be missing; the compiler, which torch always has, comes when it is first used. A
process whose other code may want them must not be treated so: only the command line, whose process is its own, asks.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

UNUSED = ("is_accelerate_available", "is_scipy_available", "is_torch_distributed_available")
MODELLING = "transformers.modeling_utils"

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


@contextmanager
def loading() -> Iterator[None]:
    """While a model is made: weights that will be read from a file are not drawn at random before."""
    if not _wanted:
        yield
        return
    from torch.nn import init
    from torch.overrides import TorchFunctionMode

    class NothingDrawn(TorchFunctionMode):
        """A tensor without storage stays as it is; torch would compute its shape in Python, with sympy."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (init.kaiming_uniform_, init.normal_, init.uniform_):
                tensor = args[0] if args else kwargs["tensor"]
                if tensor.is_meta:
                    return tensor
            return function(*args, **(kwargs or {}))

    with undisturbed(), NothingDrawn():
        yield


def import_modelling() -> None:
    """Import transformers' modelling code, lean where that is wanted; call before the engine is imported."""
    if not _wanted or "transformers" in sys.modules:
        return
    with undisturbed():
        for name, light in DEFERRED.items():
            if name not in sys.modules:
                _defer(name, light)
        answers = _say_missing()
        try:
            importlib.import_module(MODELLING)
        except Exception:
            # a release that needs more than those before it: let it have everything
            _forget()
        finally:
            for module, name, answer in answers:
                setattr(module, name, answer)


# ---- what is said to be missing


def _say_missing() -> list[tuple[Any, str, Any]]:
    """Have transformers answer that it lacks what is unused; what it answered before, to be set back."""
    homes = [importlib.import_module(name) for name in ("transformers.utils", "transformers.utils.import_utils")]
    before = [(home, name, getattr(home, name)) for home in homes for name in UNUSED if hasattr(home, name)]
    for home, name, _ in before:
        setattr(home, name, _never)
    return before


def _never(*_: Any, **__: Any) -> bool:
    return False


# ---- what comes when it is first used


class Deferred(ModuleType):
    """Stands in for a module that is imported when more of it is asked for than the `light` part."""

    def __getattr__(self, name: str) -> Any:
        # the import system and `inspect` look for names like this one in every module
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


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


def _expect_true(condition: Any) -> Any:
    """What torch asks of every condition on shapes; only symbolic ones need sympy."""
    return condition if isinstance(condition, bool) else _real(SYMBOLIC).expect_true(condition)


SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
MARKS = ("allow_in_graph", "assume_constant_result", "disable")
DEFERRED: dict[str, dict[str, Callable[..., Any]]] = {
    "torch._dynamo": dict.fromkeys(MARKS, _unmarked),
    SYMBOLIC: {"expect_true": _expect_true},
}


def _defer(name: str, light: dict[str, Callable[..., Any]]) -> None:
    """Put a stand-in where the module will be, its submodules within reach."""
    parent, _, own = name.rpartition(".")
    spec = importlib.util.find_spec(name)
    if spec is None:
        return
    stand_in = Deferred(name)
    vars(stand_in).update(light, __spec__=spec, __file__=spec.origin)
    if spec.submodule_search_locations:
        stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = stand_in
    setattr(sys.modules[parent], own, stand_in)


def _forget() -> None:
    """As if nothing of transformers had been imported, and nothing deferred."""
    for name in DEFERRED:
        if isinstance(sys.modules.get(name), Deferred):
            _withdraw(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
