"""Find every object that a model can reach.

A model can keep state in buffers, attributes, dicts and objects. It can also
keep state in variables that functions share, in the globals of a file, and in
attributes of a class. A Walk visits each object once.
"""

import array
import ctypes
import decimal
import dis
import functools
import gc
import logging
import os
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    ValuesView,
)
from contextlib import suppress
from contextvars import Context, ContextVar
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

MOST_VALUES = 100_000  # most objects that a walk visits
TORCH = f"{torch.__path__[0]}/"

OWN = nn.Module().__dict__  # attributes that every module has
LISTED = "_parameters", "_buffers", "_modules"
OWN_TABLES = {name for name, value in OWN.items() if hasattr(value, "__len__")}
NOT_ADDED = OWN_TABLES | {"training"}
OF_A_FILE = {*vars(types.ModuleType("")), "__file__", "__cached__"}
OF_A_FILE |= {"__builtins__", "__annotations__"}
OF_A_CLASS = {
    *vars(type("", (), {})), "__qualname__", "__slots__", "__annotations__",
    "__hash__", "__orig_bases__", "__parameters__", "__type_params__",
    "__match_args__", "__abstractmethods__", "__firstlineno__",
    "__static_attributes__", "__dataclass_fields__", "__dataclass_params__",
}  # fmt: skip
OF_A_LOGGER = {*vars(logging.Logger(""))}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
MORE_HOOKS = (*HOOKS, "_backward_hooks", "_backward_pre_hooks")
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Enum),
    # not np.void, a record that can be written in place
    *(np.number, np.bool_, np.character, np.datetime64),
    *(range, torch.dtype, torch.device, torch.layout, torch.Size),
)
NUMBERS = Tensor, np.ndarray, list, deque, set
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
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
DESCRIPTORS = (
    *(types.FunctionType, staticmethod, classmethod, property, type),
    *(functools.cached_property, functools._lru_cache_wrapper, *SKIPPED),
)
CALLABLE = (
    *(types.FunctionType, types.MethodType, partial, weakref.ref),
    *(functools._lru_cache_wrapper, ContextVar, *SKIPPED),
)
# Packages whose objects hold no state that affects scores.
NO_STATE = ("logging", "threading", "_thread", "inspect", "ctypes", "warnings")


# --- Whose code it is --------------------------------------------------------


# Installed packages whose models are visited like torch's own modules.
KNOWN_PACKAGES = {"torch", "transformers"}
AUTHORS = set[str]()  # files of installed packages that are models' code


def count_as_theirs(model: Any) -> None:
    """Treat a model's package as its author's code, even if installed."""
    root = type(model).__module__.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None or root in KNOWN_PACKAGES | sys.stdlib_module_names:
        return
    whole = file.removesuffix("__init__.py")
    if is_installed(file) and whole not in AUTHORS:
        AUTHORS.add(whole)
        is_theirs.cache_clear()


@cache
def is_theirs(path: str) -> bool:
    """Return whether a file of code belongs to the model's author."""
    if path.startswith((*AUTHORS,)):
        return True
    if is_installed(path) or path.startswith((TORCH, f"{SHARED}/")):
        return False
    return not path.startswith((sys.base_prefix + "/lib", "<frozen"))


def _owns(name: str) -> bool:
    """Return whether the model's author wrote the module of this name."""
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root.startswith("_cython_"):
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    return path is None or is_theirs(path)


LOOKED_UP = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
# Names with which code can reach any global of its file or of a module.
ALL_OF_FILE = {"globals", "eval", "exec", "__globals__", "f_globals"}
ENVIRONMENT = {"environ", "getenv", "putenv"}
ALL_OF_MODULE = {"vars", "getattr", "setattr", "__dict__", *ALL_OF_FILE}


@cache
def _globals_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that code looks up, and all names in the code.

    Functions inside the code count as well, as do strings that may be names.
    """
    found = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in LOOKED_UP
    }
    names = {*code.co_names}
    for inner in code.co_consts:
        if isinstance(inner, str) and inner.replace(".", "").isidentifier():
            names.add(inner)
        if isinstance(inner, types.CodeType):
            ours, all_ = _globals_in(inner)
            found |= ours
            names |= all_
    return frozenset(found), frozenset(names)


# --- Objects that hold others ------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """An object whose contents a call can replace: a dict, a list, a cell.

    Attributes:
        path: the object's name, as the model's author would write it.
        form: format of the names of the contents, with a place for the key.
        read: returns the contents by key.
        write: restores the contents; None if they cannot change.
        whole: a dict that has all contents that `read` returns, or more.
        ordered: whether calls may change the order of the contents.
    """

    path: str
    form: str
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None] | None = None
    whole: dict[Any, Any] | None = None
    ordered: bool = False

    def name(self, key: Any) -> str:
        """Return the name of the value under a key."""
        if self.has_an_id(key):  # its repr might run the author's code
            shown = f"{type(key).__name__} {id(key)}"
        else:
            shown = repr(key) if "[" in self.form else str(key)
        shown = self.form.format(shown)
        return (self.path + shown).lstrip(".")

    def has_an_id(self, key: Any) -> bool:
        """Return whether the name of the value under a key has an id()."""
        return "[" in self.form and not isinstance(key, PLAIN)


Keys = Collection[str] | None


def _some(content: dict, only: Keys, left_out: Keys) -> dict[Any, Any]:
    if left_out is not None:
        return {k: v for k, v in [*content.items()] if k not in left_out}
    if only is not None:  # a file may have many more names than these
        return {k: content[k] for k in only if k in content}
    return {**content}


def _put(content: dict, only: Keys, left_out: Keys, saved: dict) -> None:
    now = _some(content, only, left_out)
    if [*now] != [*saved]:
        for key in now:
            del content[key]
    content.update(saved)


def _attributes(
    path: str, content: dict, only: Keys = None, left_out: Keys = None
) -> Holder:
    if only is not None:  # in the order of the file; a set has none
        absent = sorted(name for name in only if name not in content)
        only = [*(name for name in [*content] if name in only), *absent]
    read = partial(_some, content, only, left_out)
    write = partial(_put, content, only, left_out)
    return Holder(path, ".{}", read, write, None if only else content)


# The next functions call the methods of dict, list, ... itself, because the
# method of a subclass may import a module, or compute.


def _of_dict(path: str, content: dict) -> Holder:
    kind = OrderedDict if isinstance(content, OrderedDict) else dict
    read = partial(_read_dict, kind, content)
    write = partial(_write_dict, kind, content)
    return Holder(path, "[{}]", read, write, ordered=True)


def _read_dict(kind: type[dict], content: dict) -> dict[Any, Any]:
    return dict(kind.items(content))


def _write_dict(kind: type[dict], content: dict, saved: dict) -> None:
    kind.clear(content)
    kind.update(content, saved)


def _of_list(path: str, value: list | deque) -> Holder:
    kind = list if isinstance(value, list) else deque
    read = partial(_read_list, kind, value)
    return Holder(path, "[{}]", read, partial(_write_list, kind, value))


def _read_list(kind: Any, value: list | deque) -> dict[int, Any]:
    return dict(enumerate(kind.__iter__(value)))


def _write_list(kind: Any, value: list | deque, saved: dict) -> None:
    kind.clear(value)
    kind.extend(value, saved.values())


def _members(value: set | frozenset) -> dict[Any, Any]:
    """Return the members of a set, with names that do not depend on order."""
    kind: Any = set if isinstance(value, set) else frozenset
    held = [*kind.__iter__(value)]
    if all(isinstance(member, PLAIN) for member in held):
        return {member: member for member in sorted(held, key=hash)}
    return dict(enumerate(held))


def _write_set(value: set, saved: dict) -> None:
    set.clear(value)
    set.update(value, saved.values())


def _of_objects(path: str, value: np.ndarray) -> Holder:
    """Return an array's objects as a Holder, without a subclass's methods."""
    flat = np.ndarray.flat.__get__(value)
    return Holder(
        path, "[{}]", partial(_read_flat, flat), partial(_write_flat, flat)
    )


def _read_flat(flat: Any) -> dict[int, Any]:
    return dict(enumerate(flat.copy()))  # a flatiter can be read only once


def _write_flat(flat: Any, saved: dict) -> None:
    for number, held in saved.items():
        flat[number] = held


def _of_cell(path: str, name: str, cell: types.CellType) -> Holder:
    read = partial(_read_cell, name, cell)
    return Holder(path, ".{}", read, partial(_write_cell, name, cell))


def _read_cell(name: str, cell: types.CellType) -> dict[str, Any]:
    try:
        return {name: cell.cell_contents}
    except ValueError:  # the cell is empty
        return {}


def _write_cell(name: str, cell: types.CellType, saved: dict) -> None:
    if saved:
        cell.cell_contents = saved[name]
    elif _read_cell(name, cell):
        del cell.cell_contents


def _of_slots(path: str, value: Any, slots: dict[str, Any]) -> Holder:
    read = partial(_read_slots, value, slots)
    return Holder(path, ".{}", read, partial(_write_slots, value, slots))


def _read_slots(value: Any, slots: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, slot in slots.items():
        with suppress(AttributeError):  # the slot is empty
            found[name] = slot.__get__(value)
    return found


def _write_slots(value: Any, slots: dict[str, Any], saved: dict) -> None:
    for name, held in saved.items():
        slots[name].__set__(value, held)


def _of_class(path: str, kind: type) -> Holder:
    """Return the attributes of a class in the model's code as a Holder."""
    read = partial(_read_class, kind)
    return Holder(path, ".{}", read, partial(_write_class, kind, read))


def _read_class(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in [*vars(kind).items()]
        if not name.startswith("_abc_")
        and name not in OF_A_CLASS
        and (isinstance(value, Tensor) or not hasattr(value, "__get__"))
    }


def _of_foreign_class(kind: type, names: set[str]) -> Holder:
    """Return attributes that the model's code may have added to a class."""
    read = partial(_read_foreign_class, kind, names)
    write = partial(_write_class, kind, read)
    return Holder(kind.__name__, ".{}", read, write)


def _read_foreign_class(kind: type, names: set[str]) -> dict[str, Any]:
    held, kinds = vars(kind), PLAIN + NUMBERS
    own = {n: held[n] for n in names & held.keys() if n[:2] != "__"}
    return {n: v for n, v in own.items() if isinstance(v, kinds)}


def _write_class(
    kind: type, read: Callable[[], dict[str, Any]], saved: dict
) -> None:
    for name in read().keys() - saved.keys():
        delattr(kind, name)
    for name, value in saved.items():
        setattr(kind, name, value)


# --- The walk ----------------------------------------------------------------


class Walk:
    """Visits everything that a model can reach, each object once.

    Args:
        model: the object at which the walk starts.
        by_code: whether to go through functions: to their variables, the
            globals that they use, and attributes of classes.
        by_id: whether to visit contents whose name contains an object's id(),
            which differs in a copy of the model.

    Attributes:
        holders: objects with contents, by name.
        tensors, arrays, generators: objects of these kinds, by name.
        unread: objects whose state cannot be read, by name.
        visited: all visited objects, by id.
    """

    def __init__(self, model: Any, by_code: bool = True, by_id: bool = True):
        self.by_code, self.by_id = by_code, by_id
        self.holders: list[Holder] = []
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.generators: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self.visited: dict[int, Any] = {}  # held, so that ids stay unique
        self._names: dict[int, set[str]] = {}  # names seen, by id of file dict
        self._used = set[str]()  # all names in the author's code
        self._todo = deque([("", model)])
        self._go()
        if "grad" in self._used:
            self._todo += _gradients(self.tensors)
            self._go()
        for kind in [*self.visited.values()]:
            if isinstance(kind, type) and not _owns(kind.__module__):
                added = _of_foreign_class(kind, self._used)
                if added.read():
                    self._hold(added)
        for path, _ in self._todo:
            self.unread[path] = "more than the kit looks through"
        for name in self._used & COUNTS.keys():
            self.unread[name] = COUNTS[name]

    def _go(self) -> None:
        while self._todo and len(self.visited) < MOST_VALUES:
            path, value = self._todo.popleft()
            try:
                self._visit(path, value)
            except Exception:  # reading may run code of the model's author
                self.unread[path] = type(value).__name__

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
            if value.dtype.hasobject:
                self._hold(_of_objects(path, value))
            else:
                self.arrays[path] = value
            self._own_attributes(path, value)
        elif isinstance(value, (random.SystemRandom, np.void)):
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
            write = partial(_write_set, value)
            self._hold(Holder(path, "[{}]", partial(_members, value), write))
            self._own_attributes(path, value)
        elif isinstance(value, frozenset):
            self._hold(Holder(path, "[{}]", partial(_members, value)))
            self._own_attributes(path, value)
        elif isinstance(value, tuple):
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
        """Visit the attributes of an object whose class adds attributes."""
        held = getattr(value, "__dict__", None)
        if plainly and isinstance(held, dict) and held is not value:
            self._hold(_attributes(path, held))
            if not type(value).__module__.startswith("torch"):
                self._classes(type(value))

    def _hold(self, holder: Holder) -> None:
        """Keep a holder, and visit its contents later."""
        content = holder.read()
        if len(content) > MOST_VALUES:
            self.unread[holder.path] = f"{len(content):,} values"
            return
        self.holders.append(holder)
        for key, value in content.items():
            if holder.has_an_id(key) and not self.by_id:
                continue
            if not isinstance(value, PLAIN) or _has_attributes(value):
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
        if "_orig_mod" not in inner:  # not in the wrapper of torch.compile
            held = vars(module)
            self._hold(_attributes(path, held, left_out=NOT_ADDED))
            self._own_tables(path, held)
        slots = _slots(type(module))
        if slots:
            self._hold(_of_slots(path, module, slots))
        if self.by_code:
            for name in MORE_HOOKS:
                hooks = [*getattr(module, name, {}).values()]
                self._todo += [(_join(path, "hook"), hook) for hook in hooks]
            self._classes(type(module))

    def _own_tables(self, path: str, held: dict[str, Any]) -> None:
        """Visit what an author added to the dicts that every module has."""
        for name in OWN_TABLES & held.keys():
            table = held[name]
            usual = type(table) is type(OWN[name])
            filled = table and name not in LISTED
            if not usual or filled or getattr(table, "__dict__", None):
                self._todo.append((_join(path, name), table))

    def _classes(self, kind: type) -> None:
        if self.by_code:
            self._todo += [(k.__name__, k) for k in kind.__mro__]

    def _class(self, path: str, kind: type) -> None:
        """Visit the attributes and methods of a class in the model's code."""
        if not (self.by_code and _owns(kind.__module__)):
            return
        self._hold(_of_class(path, kind))
        self._classes(type(kind))
        for name, value in [*vars(kind).items()]:
            for function in _functions_in(value):
                self._todo.append((f"{path}.{name}", function))
            usual = isinstance(value, (Tensor, *DESCRIPTORS))
            if hasattr(value, "__get__") and not usual:  # may hold a state
                self._todo.append((f"{path}.{name}", value))

    def _function(self, path: str, function: types.FunctionType) -> None:
        """Visit the variables of a function, and globals that it looks up."""
        code, wrapped = function.__code__, vars(function).get("__wrapped__")
        if not self.by_code or code.co_filename.startswith(TORCH):
            return
        if "<@" in code.co_filename:  # generated by a type checker
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
        """Visit a default value; calls share a default list or dict.

        Such values are not restored: `shared_default` reports them.
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
        """Visit those globals of a file that its code uses.

        Globals of imported modules are visited as well, if the code uses them.
        """
        more = {*more}
        self._used |= more
        whole = more & ALL_OF_FILE or {"sys", "modules"} <= more
        done = self._names.setdefault(id(held), set())
        new = {*(held if whole else names)} - done
        done |= new
        path = str(held.get("__name__", "")).rpartition(".")[2]
        modules = {
            name: held[name]
            for name in new
            if isinstance(held.get(name), types.ModuleType)
        }
        new -= modules.keys()
        new -= OF_A_FILE
        self._hold(_attributes(path, held, only=new))
        modules |= _imported(more, str(held.get("__package__") or ""))
        for name, module in modules.items():
            inside = vars(module)
            if _owns(module.__name__):
                by_name = more & ALL_OF_MODULE
                self._globals(inside, inside if by_name else more, ())
            elif module is os and more & ENVIRONMENT:
                self._todo.append(("os.environ", os.environ))
            else:  # plain values that the author may have set there
                kinds = PLAIN + NUMBERS
                added = {n for n in more if isinstance(inside.get(n), kinds)}
                if added:
                    self._hold(_attributes(name, inside, only=added))

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
        elif isinstance(value, Context):
            self._hold(Holder(path, "[{}]", lambda: _variables(value)))
        elif isinstance(value, types.CellType):
            self._hold(_of_cell(path, "cell_contents", value))
        elif isinstance(value, METHODS):
            self._todo.append((path, value.__self__))
        elif isinstance(value, types.ModuleType):
            self._python_module(path, value)
        elif not isinstance(value, SKIPPED):
            self._object(path, value, kind)

    def _python_module(self, path: str, module: types.ModuleType) -> None:
        """Visit a Python module that is an attribute, such as settings.py."""
        held = vars(module)
        if self.by_code and _owns(str(held.get("__name__"))):
            names = {name for name in held if name not in OF_A_FILE}
            self._hold(_attributes(path, held, only=names))

    def _object(self, path: str, value: Any, kind: type) -> None:
        root = kind.__module__.partition(".")[0]
        if isinstance(value, C_DATA):
            self.unread[path] = kind.__name__
        if root in NO_STATE and not hasattr(value, "__dict__"):
            return
        if isinstance(value, logging.Logger):
            own = OF_A_LOGGER
            self._hold(_attributes(path, vars(value), left_out=own))
        if root == "logging":
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._hold(_attributes(path, held))
        slots = _slots(kind)
        if slots:
            self._hold(_of_slots(path, value, slots))
        if isinstance(value, REFERRING):
            self._hold(Holder(path, "[{}]", lambda: _referents(value)))
        self._classes(kind)
        unread = isinstance(value, UNREAD) or not (
            held is not None or slots or _is_known(root)
        )
        if unread:
            self.unread[path] = kind.__name__


# Attributes of C objects that count calls; the counts are not restored.
COUNTS = {"cache_info": "how often a cache was read"}
C_FUNCTION: Any = type(ctypes.pythonapi.Py_IncRef).__base__
UNREAD = (
    *(Iterator, Coroutine, AsyncIterator, bytearray, memoryview, array.array),
    *(decimal.Context, ctypes.CDLL, C_FUNCTION),
)
# kinds of C objects whose contents only the garbage collector lists
REFERRING = slice, BaseException, KeysView, ValuesView, ItemsView
C_DATA = ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union
METHODS = types.BuiltinMethodType, types.MethodWrapperType


def _gradients(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the gradients that tensors hold, by name."""
    leaves = [(name, t.grad) for name, t in tensors.items() if t.is_leaf]
    return [(_join(name, "grad"), g) for name, g in leaves if g is not None]


def _imported(names: set[str], package: str) -> dict[str, types.ModuleType]:
    """Return the author's modules whose names occur in code, by name.

    A function may import a module itself. Only loaded modules are returned.
    """
    found = dict[str, types.ModuleType]()
    starts = ["", f"{package}."] if package else [""]
    for start in starts:  # the list grows: a found module may contain another
        for name in names:
            full = start + name
            module = sys.modules.get(full)
            if isinstance(module, types.ModuleType) and _owns(full):
                if full not in found:
                    starts.append(f"{full}.")
                found[full] = module
    return found


def _referents(value: Any) -> dict[int, Any]:
    """Return the objects that an object implemented in C refers to."""
    held = gc.get_referents(value)
    hidden = types.TracebackType, type
    return dict(enumerate(v for v in held if not isinstance(v, hidden)))


def _variables(context: Context) -> dict[str, Any]:
    return {variable.name: value for variable, value in context.items()}


def _is_known(root: str) -> bool:
    """Return whether the objects of a package are known to hide no state."""
    return root in STATELESS


# Packages whose C objects hide no state, unlike SimpleQueue, hashes and files.
STATELESS = {"builtins", "torch", "numpy", "re", "datetime", "decimal"}
STATELESS |= {"operator", "types", "functools", "weakref", "_weakref"}
STATELESS |= {"_thread", "threading", "enum", "typing", "_contextvars"}
STATELESS |= {"contextvars", "pathlib", "fractions", "ctypes", "_ctypes"}
STATELESS |= {"collections", "_collections", "zoneinfo", "uuid", "inspect"}
STATELESS |= {"warnings", "_abc", "abc", "logging"}


def _has_attributes(value: Any) -> bool:
    """Return whether a plain value has attributes, like some subclasses."""
    if not type(value).__dictoffset__:
        return False
    if not isinstance(value, Enum):
        return True
    return any(name[0] + name[-1] != "__" for name in vars(value))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _slots(kind: type) -> dict[str, Any]:
    """Return the slots of a class and its bases, by name.

    Python writes the class into the name of a private slot: `_Class__name`.
    """
    return {
        name: value
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }


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
    """Return the contents of a functools.lru_cache, which is only read."""
    attributes = function.__dict__
    sized = functools._lru_cache_wrapper.cache_info(function).maxsize

    def read() -> dict[int, Any]:
        held = gc.get_referents(function)
        tables = [r for r in held if type(r) is dict and r is not attributes]
        if sized is None:
            found = [v for table in tables for v in table.values()]
            return dict(enumerate(found))
        # a cache with a size has a table of links, in which values follow keys
        links = next((t for t in tables if _has_links(t)), {})
        places, left = {id(key): n for n, key in enumerate(links)}, iter(held)
        pairs = ((places[id(r)], next(left)) for r in left if id(r) in places)
        return dict(sorted(pairs, key=lambda pair: pair[0]))

    return Holder(f"{path}.cache", "[{}]", read)


def _has_links(table: dict[Any, Any]) -> bool:
    kinds = {type(value).__name__ for value in table.values()}
    return kinds == {"_lru_list_elem"}


def _of_context(path: str, variable: ContextVar) -> Holder:
    """Return the value of a context variable, or its default."""

    def read() -> dict[str, Any]:
        try:
            return {"": variable.get()}
        except LookupError:  # the variable has neither a value nor a default
            return {}

    def write(saved: dict) -> None:
        if saved:
            variable.set(saved[""])

    return Holder(path, "{}", read, write)
