"""Everything that a model can reach.

A forward keeps numbers in more places than buffers: attributes, dicts and
objects, variables that functions share, names of a file, attributes of a
class. A Walk visits each of them once.
"""

import array
import dis
import functools
import gc
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...validation import is_installed
from ..operations import is_plain
from ..places import SHARED

MOST_VALUES = 100_000  # objects of a walk
TORCH = f"{torch.__path__[0]}/"

OWN = nn.Module().__dict__.keys()  # of every module
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, np.generic),
    *(range, slice, torch.dtype, torch.device, torch.layout, torch.Size),
)
GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)
SKIPPED = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.ModuleType, types.CodeType, types.FrameType),
)
DESCRIPTORS = (
    *(types.FunctionType, staticmethod, classmethod, property, type),
    *(functools.cached_property, functools._lru_cache_wrapper, *SKIPPED),
)
CALLABLE = (
    *(types.FunctionType, types.MethodType, partial, weakref.ref),
    *(functools._lru_cache_wrapper, ContextVar, *SKIPPED),
)
# Objects of these packages hold no number of a score.
NO_STATE = ("logging", "threading", "_thread", "inspect", "ctypes", "warnings")


# --- Whose code it is --------------------------------------------------------


@cache
def is_theirs(path: str) -> bool:
    """Whether a file of code belongs to the model's author."""
    if is_installed(path) or path.startswith((TORCH, f"{SHARED}/")):
        return False
    return not path.startswith((sys.base_prefix + "/lib", "<frozen"))


def _owns(name: str) -> bool:
    """Whether a module of Python's, by its name, is of the model's author."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    return path is None or is_theirs(path)


LOOKED_UP = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")


@cache
def _globals_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of its file that code looks up, and all its names.

    With those of the functions that are written inside.
    """
    found = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in LOOKED_UP
    }
    names = {*code.co_names}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            ours, all_ = _globals_in(inner)
            found |= ours
            names |= all_
    return frozenset(found), frozenset(names)


# --- What holds other things -------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """Something whose contents a call can replace: a dict, a list, a cell.

    Attributes:
        path: its name, as the model's author would write it.
        form: of the names of what it holds, with a place for the key.
        read: returns what it holds, by key.
        write: puts that back; None: it cannot change.
    """

    path: str
    form: str
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None] | None = None

    def name(self, key: Any) -> str:
        """Return the name of what it holds under a key."""
        shown = str(key)
        if "[" in self.form:
            known = isinstance(key, PLAIN)
            shown = repr(key) if known else f"{type(key).__name__} {id(key)}"
        shown = self.form.format(shown)
        return (self.path + shown).lstrip(".")


def _some(content: dict, keys: Callable[[Any], bool]) -> dict[Any, Any]:
    return {k: v for k, v in [*content.items()] if keys(k)}


def _put(content: dict, keys: Callable[[Any], bool], saved: dict) -> None:
    if [*_some(content, keys)] != [*saved]:
        for key in _some(content, keys):
            del content[key]
    content.update(saved)


def _attributes(
    path: str, content: dict, keys: Callable[[Any], bool] = lambda key: True
) -> Holder:
    read, write = partial(_some, content, keys), partial(_put, content, keys)
    return Holder(path, ".{}", read, write)


# Methods of Python's own class: a subclass may import a module, or compute,
# when it is read.


def _of_dict(path: str, content: dict) -> Holder:
    kind = OrderedDict if isinstance(content, OrderedDict) else dict

    def write(saved: dict) -> None:
        kind.clear(content)
        kind.update(content, saved)

    return Holder(path, "[{}]", lambda: dict(kind.items(content)), write)


def _of_list(path: str, value: list | deque) -> Holder:
    kind: Any = list if isinstance(value, list) else deque

    def read() -> dict[int, Any]:
        return dict(enumerate(kind.__iter__(value)))

    def write(saved: dict) -> None:
        kind.clear(value)
        kind.extend(value, saved.values())

    return Holder(path, "[{}]", read, write)


def _of_set(path: str, value: set) -> Holder:
    def write(saved: dict) -> None:
        set.clear(value)
        set.update(value, saved.values())

    def read() -> dict[int, Any]:
        return dict(enumerate(set.__iter__(value)))

    return Holder(path, "[{}]", read, write)


def _of_cell(path: str, name: str, cell: types.CellType) -> Holder:
    def read() -> dict[str, Any]:
        try:
            return {name: cell.cell_contents}
        except ValueError:  # it is empty
            return {}

    def write(saved: dict) -> None:
        if saved:
            cell.cell_contents = saved[name]
        elif read():
            del cell.cell_contents

    return Holder(path, ".{}", read, write)


def _of_slots(path: str, value: Any, names: list[str]) -> Holder:
    def read() -> dict[str, Any]:
        return {n: getattr(value, n) for n in names if hasattr(value, n)}

    def write(saved: dict) -> None:
        for name, held in saved.items():
            with suppress(AttributeError, TypeError):  # it is frozen
                object.__setattr__(value, name, held)

    return Holder(path, ".{}", read, write)


def _of_class(path: str, kind: type) -> Holder:
    def read() -> dict[str, Any]:
        return {
            name: value
            for name, value in [*vars(kind).items()]
            if not (name.startswith("_abc_") or name[:2] == "__")
            and (isinstance(value, Tensor) or not hasattr(value, "__get__"))
        }

    def write(saved: dict) -> None:
        for name in read().keys() - saved.keys():
            delattr(kind, name)
        for name, value in saved.items():
            setattr(kind, name, value)

    return Holder(path, ".{}", read, write)


# --- The walk ----------------------------------------------------------------


class Walk:
    """Visits what a model can reach, each thing once.

    Args:
        model: where the walk begins.
        by_code: whether it goes through functions: their variables, the
            names of their file that they use, and attributes of classes.

    Attributes:
        holders: what has contents; tensors, arrays and generators: what has
            numbers; by name.
        unread: objects whose state cannot be read, by name.
        visited: all of it, by id.
    """

    def __init__(self, model: Any, by_code: bool = True):
        self.by_code = by_code
        self.holders: list[Holder] = []
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.generators: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self.visited: dict[int, Any] = {}  # they live while this does
        self._names: dict[int, set[str]] = {}  # of a file, that were visited
        self._todo = deque([("", model)])
        while self._todo and len(self.visited) < MOST_VALUES:
            path, value = self._todo.popleft()
            try:
                self._visit(path, value)
            except Exception:  # code of the model's author runs there
                self.unread[path] = type(value).__name__
        for path, _ in self._todo:
            self.unread[path] = "more than the kit looks through"

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN) and not _has_attributes(value):
            return
        if id(value) in self.visited:
            return
        self.visited[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors[path] = value
            if type(value) is not nn.Parameter or vars(value):
                self._own_attributes(path, value, is_plain(type(value)))
        elif isinstance(value, np.ndarray):
            self.arrays[path] = value
            self._own_attributes(path, value)
        elif isinstance(value, random.SystemRandom):
            self.unread[path] = type(value).__name__
        elif isinstance(value, GENERATORS):
            self.generators[path] = value
            self._own_attributes(path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, dict):
            self._hold(_of_dict(path, value))
            self._own_attributes(path, value)
        elif isinstance(value, list | deque):
            self._hold(_of_list(path, value))
            self._own_attributes(path, value)
        elif isinstance(value, set):
            self._hold(_of_set(path, value))
            self._own_attributes(path, value)
        elif isinstance(value, tuple | frozenset):
            found = dict(enumerate(value))
            self._hold(Holder(path, "[{}]", lambda: found))
            self._own_attributes(path, value)
        elif isinstance(value, types.MappingProxyType):
            self._hold(Holder(path, "[{}]", lambda: dict(value)))
        elif isinstance(value, type):
            self._class(path, value)
        else:
            self._other(path, value)

    def _own_attributes(
        self, path: str, value: Any, plainly: bool = True
    ) -> None:
        """Visit attributes that a list, a tensor, ... of a class may have."""
        held = getattr(value, "__dict__", None)
        if plainly and isinstance(held, dict) and held is not value:
            self._hold(_attributes(path, held))
            if not type(value).__module__.startswith("torch"):
                self._classes(type(value))

    def _hold(self, holder: Holder) -> None:
        """Keep a holder, and visit what it holds later."""
        content = holder.read()
        if len(content) > MOST_VALUES:
            self.unread[holder.path] = f"{len(content):,} values"
            return
        self.holders.append(holder)
        for key, value in content.items():
            if not isinstance(value, PLAIN):
                self._todo.append((holder.name(key), value))

    def _module(self, path: str, module: nn.Module) -> None:
        """Visit a module: its parts, buffers, attributes, hooks, its class."""
        inner = dict(module._modules.items())
        if isinstance(module, torch.jit.ScriptModule):
            for name, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ):
                self._todo.append((_join(path, name), tensor))
            self._todo += [(_join(path, n), m) for n, m in inner.items()]
            self.unread[path or "the model"] = type(module).__name__
            return
        fixed = module._parameters
        self._hold(Holder(path, ".{}", lambda: dict(fixed)))
        self._hold(_attributes(path, module._buffers))
        self._hold(_attributes(path, module._modules))
        if "_orig_mod" not in inner:  # of torch.compile
            held = vars(module)
            self._hold(_attributes(path, held, lambda key: key not in OWN))
        slots = [n for k in type(module).__mro__ for n in _slots(k)]
        if slots:
            self._hold(_of_slots(path, module, slots))
        if self.by_code:
            for name in HOOKS:
                hooks = [*getattr(module, name, {}).values()]
                self._todo += [(_join(path, "hook"), hook) for hook in hooks]
            self._classes(type(module))

    def _classes(self, kind: type) -> None:
        if self.by_code:
            self._todo += [(k.__name__, k) for k in kind.__mro__]

    def _class(self, path: str, kind: type) -> None:
        """Visit the attributes of a class of the author's, and its methods."""
        if not (self.by_code and _owns(kind.__module__)):
            return
        self._hold(_of_class(path, kind))
        for name, value in [*vars(kind).items()]:
            for function in _functions_in(value):
                self._todo.append((f"{path}.{name}", function))
            usual = isinstance(value, (Tensor, *DESCRIPTORS))
            if hasattr(value, "__get__") and not usual:  # it may hold a state
                self._todo.append((f"{path}.{name}", value))

    def _function(self, path: str, function: types.FunctionType) -> None:
        """Visit the variables of a function, and names that it looks up."""
        code, wrapped = function.__code__, vars(function).get("__wrapped__")
        if not self.by_code or code.co_filename.startswith(TORCH):
            return
        if "<@" in code.co_filename:  # a checker of types wrote it
            self._todo.append((path, wrapped))
            return
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if id(cell) not in self.visited:
                self.visited[id(cell)] = cell
                self._hold(_of_cell(function.__name__, name, cell))
        if wrapped is not None:
            self._todo.append((path, wrapped))
        if is_theirs(code.co_filename) or vars(function):
            self._hold(_attributes(function.__name__, vars(function)))
        defaults = [*(function.__defaults__ or ())]
        defaults += (function.__kwdefaults__ or {}).values()
        name = f"{function.__name__}.default"
        for value in defaults:
            self._default(name, value)
        if is_theirs(code.co_filename):
            self._globals(function.__globals__, *_globals_in(code))

    def _default(self, name: str, value: Any) -> None:
        """Visit a default. All calls share one list or dict.

        It is not put back: `shared_default` reports it to the author.
        """
        if id(value) in self.visited:
            return
        if isinstance(value, dict):
            self._hold(replace(_of_dict(name, value), write=None))
        elif isinstance(value, list):
            self._hold(replace(_of_list(name, value), write=None))
        else:
            self._todo.append((name, value))
            return
        self.visited[id(value)] = value

    def _globals(
        self, held: dict[str, Any], names: Iterable[str], more: Iterable[str]
    ) -> None:
        """Visit names of a file that code uses.

        Of a file that it imports as a module, each name that it writes.
        """
        done = self._names.setdefault(id(held), set())
        new = {*names} - done
        done |= new
        path = str(held.get("__name__", "")).rpartition(".")[2]
        modules = {
            name: held[name]
            for name in new
            if isinstance(held.get(name), types.ModuleType)
        }
        new -= modules.keys()
        new = {name for name in new if name[:2] != "__"}
        self._hold(_attributes(path, held, new.__contains__))
        for module in modules.values():
            if _owns(module.__name__):
                self._globals(vars(module), more, ())

    def _other(self, path: str, value: Any) -> None:
        """Visit a function or an object."""
        kind = type(value)
        if isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._todo.append((path, value.__self__))
            self._todo.append((path, value.__func__))
        elif isinstance(value, partial):
            held = {"": (value.func, value.args, value.keywords)}
            self._hold(Holder(path, "{}", lambda: held))
            self._own_attributes(path, value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._todo.append((path, value.__wrapped__))
            self._hold(_of_cache(path, value))
        elif isinstance(value, weakref.ref):
            self._todo.append((path, value()))
        elif isinstance(value, ContextVar):
            self._hold(_of_context(path, value))
        elif not isinstance(value, SKIPPED):
            self._object(path, value, kind)

    def _object(self, path: str, value: Any, kind: type) -> None:
        root = kind.__module__.partition(".")[0]
        if root in NO_STATE and not hasattr(value, "__dict__"):
            return
        if root == "logging":
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._hold(_attributes(path, held))
        slots = [n for k in kind.__mro__ for n in _slots(k)]
        if slots:
            self._hold(_of_slots(path, value, slots))
        self._classes(kind)
        unread = isinstance(value, UNREAD) or not (
            held is not None or slots or _is_known(root)
        )
        if unread:
            self.unread[path] = kind.__name__


UNREAD = Iterator, bytearray, memoryview, array.array


def _is_known(root: str) -> bool:
    """Whether objects of a package, which show no contents, hold no state."""
    return root in STATELESS


# Of SimpleQueue, a hash, a file or a connection, say, no contents are seen.
STATELESS = {"builtins", "torch", "numpy", "re", "datetime", "decimal"}
STATELESS |= {"operator", "types", "functools", "weakref", "_weakref"}
STATELESS |= {"_thread", "threading", "enum", "typing", "_contextvars"}
STATELESS |= {"contextvars", "pathlib", "fractions", "ctypes", "_ctypes"}
STATELESS |= {"collections", "_collections", "zoneinfo", "uuid", "inspect"}
STATELESS |= {"warnings", "_abc", "abc", "logging"}


def _has_attributes(value: Any) -> bool:
    """Whether a plain value is of a class of the author's, with attributes."""
    return not isinstance(value, Enum) and hasattr(value, "__dict__")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    names = [names] if isinstance(names, str) else [*names]
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def _functions_in(value: Any) -> list[Any]:
    """Return the functions in an attribute of a class."""
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [f for f in (value.fget, value.fset) if f is not None]
    if isinstance(value, functools.cached_property):
        return [value.func]
    functions = types.FunctionType, functools._lru_cache_wrapper
    return [value] if isinstance(value, functions) else []


def _of_cache(path: str, function: Any) -> Holder:
    """Return what functools.lru_cache keeps; it is only read."""

    def read() -> dict[int, Any]:
        held = gc.get_referents(function)
        tables = [
            r for r in held if type(r) is dict and r is not vars(function)
        ]
        found = [v for table in tables for v in table.values()]
        return dict(enumerate(found))

    return Holder(f"{path}.cache", "[{}]", read)


def _of_context(path: str, variable: ContextVar) -> Holder:
    """Return the value of a variable; one that was not set has its default."""

    def read() -> dict[str, Any]:
        try:
            return {"": variable.get()}
        except LookupError:  # it has no default
            return {}

    def write(saved: dict) -> None:
        if saved:
            variable.set(saved[""])

    return Holder(path, "{}", read, write)
