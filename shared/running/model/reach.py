"""All that a model can reach: read, compared, and put back in place.

A forward keeps numbers in more places than buffers: attributes, dicts and
objects, variables that functions share, names of a file, attributes of a
class. A Walk visits them all. A KeptState puts back what was there in the same
objects and in the same memory: a copy would part a buffer from a function, a
hook or a view that reads it.
"""

import array
import dis
import functools
import gc
import operator
import random
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..operations import parts_of
from ..places import SHARED
from ..ranks import local

SMALL = 4096  # numbers of a frozen parameter that is kept with the state
MOST_VALUES = 100_000  # objects of a walk
LONG_LIST = 1000  # plain values of a container that have no names of their own
TOO_MANY = "more numbers than the kit keeps"
MOST_BYTES = 1 << 30  # of memory that is kept
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
    torch.Generator,
)
SKIPPED = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.ModuleType, types.CodeType, types.FrameType),
)
# What these hold has no part in a score.
NO_STATE = ("logging", "threading", "_thread", "inspect", "ctypes", "warnings")


# --- Whose code it is --------------------------------------------------------


@cache
def is_theirs(path: str) -> bool:
    """Whether a file of code belongs to the model's author."""
    if "-packages" in path or path.startswith((TORCH, f"{SHARED}/")):
        return False
    return not path.startswith((sys.base_prefix + "/lib", "<frozen"))


def _owns(name: str) -> bool:
    """Whether a module of Python's, by its name, is of the model's author."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    return path is None or is_theirs(path)


UNSET = object()  # of a variable
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


def _of_dict(path: str, content: dict) -> Holder:
    def write(saved: dict) -> None:
        content.clear()
        content.update(saved)

    return Holder(path, "[{}]", lambda: dict(content.items()), write)


def _of_list(path: str, value: list | deque) -> Holder:
    def write(saved: dict) -> None:
        value.clear()
        value.extend(saved.values())

    return Holder(path, "[{}]", lambda: dict(enumerate(value)), write)


def _of_set(path: str, value: set) -> Holder:
    def write(saved: dict) -> None:
        value.clear()
        value.update(saved.values())

    return Holder(path, "[{}]", lambda: dict(enumerate(value)), write)


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
    """

    def __init__(self, model: Any, by_code: bool = True):
        self.by_code = by_code
        self.holders: list[Holder] = []
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.generators: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # they live while this does
        self._names: dict[int, set[str]] = {}  # of a file, that were visited
        self._todo = deque([("", model)])
        while self._todo and len(self._seen) < MOST_VALUES:
            path, value = self._todo.popleft()
            try:
                self._visit(path, value)
            except Exception:  # code of the model's author runs there
                self.unread[path] = type(value).__name__
        for path, _ in self._todo:
            self.unread[path] = "more than the kit looks through"

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors[path] = value
            held = getattr(value, "__dict__", None)
            if held and type(value) in (Tensor, nn.Parameter):
                self._hold(_attributes(path, held))
        elif isinstance(value, np.ndarray):
            self.arrays[path] = value
        elif isinstance(value, random.SystemRandom):
            self.unread[path] = type(value).__name__
        elif isinstance(value, GENERATORS):
            self.generators[path] = value
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, dict):
            self._hold(_of_dict(path, value))
        elif isinstance(value, list | deque):
            self._hold(_of_list(path, value))
        elif isinstance(value, set):
            self._hold(_of_set(path, value))
        elif isinstance(value, tuple | frozenset):
            found = dict(enumerate(value))
            self._hold(Holder(path, "[{}]", lambda: found))
        elif isinstance(value, type):
            self._class(path, value)
        else:
            self._other(path, value)

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
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._hold(_of_cell(function.__name__, name, cell))
        if held := {**vars(function)}:
            if held.keys() - {"__wrapped__"}:
                self._hold(_attributes(function.__name__, vars(function)))
            self._todo.append((path, wrapped))
        defaults = [*(function.__defaults__ or ())]
        defaults += (function.__kwdefaults__ or {}).values()
        name = f"{function.__name__}.default"
        for value in defaults:
            self._default(name, value)
        if is_theirs(code.co_filename):
            self._globals(function.__globals__, *_globals_in(code))

    def _default(self, name: str, value: Any) -> None:
        """Visit a default. One list or dict is there for all calls.

        It is not put back: `shared_default` tells the author of it.
        """
        if id(value) in self._seen:
            return
        if isinstance(value, dict):
            self._hold(replace(_of_dict(name, value), write=None))
        elif isinstance(value, list):
            self._hold(replace(_of_list(name, value), write=None))
        else:
            self._todo.append((name, value))
            return
        self._seen[id(value)] = value

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
    return root in sys.stdlib_module_names or root in ("torch", "numpy")


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
        value = variable.get(UNSET)
        return {} if value is UNSET else {"": value}

    def write(saved: dict) -> None:
        if saved:
            variable.set(saved[""])
        else:
            with suppress(LookupError):  # it has no default
                variable.set(Context().run(variable.get))

    return Holder(path, "{}", read, write)


# --- Values ------------------------------------------------------------------

Values = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """The state of a generator of Python's or NumPy's."""

    state: object


def values_of(model: Any) -> Values:
    """Return copies of all values that a model can reach, by name.

    Parameters are left out: no forward trains them.
    """
    walk, found = Walk(model), Values()
    for holder in walk.holders:
        content = holder.read()
        plain = {k: v for k, v in content.items() if isinstance(v, PLAIN)}
        if len(plain) > LONG_LIST:  # it has one name
            found[holder.path], plain = [*plain.items()], {}
        for key, value in content.items():
            if key in plain:
                found[holder.name(key)] = value
            elif not isinstance(value, PLAIN):
                found.setdefault(holder.name(key), type(value))
    for name, tensor in walk.tensors.items():
        with suppress(Exception):
            if not _is_weight(tensor):
                found[name] = _copy_of(local(tensor).detach())
    for name, held in walk.arrays.items():
        if held.nbytes <= MOST_BYTES:
            found[name] = held.copy()
    for name, generator in walk.generators.items():
        if not isinstance(generator, torch.Generator):  # its draws are seen
            found[name] = Drawn(_state_of(generator))
    return found


def _copy_of(tensor: Tensor) -> Any:
    """Return a copy of a tensor; of a large one how often it was written."""
    if tensor.nbytes > MOST_BYTES and not tensor.is_inference():
        return tensor._version
    return tensor.clone()


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter that is not kept with the state."""
    if not isinstance(tensor, nn.Parameter):
        return False
    return tensor.requires_grad or tensor.numel() > SMALL


def changed(before: Values, after: Values) -> list[str]:
    """Return the names whose values are not equal, in their order."""
    names = [*after, *(n for n in before if n not in after)]
    return [
        name
        for name in names
        if name not in before
        or name not in after
        or not _alike(before[name], after[name])
    ]


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        with suppress(Exception):
            same = one == other
            if one.is_floating_point() or one.is_complex():
                same |= one.isnan() & other.isnan()
            return bool(same.all())
        return True
    if isinstance(one, np.ndarray):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and one.tobytes() == other.tobytes()
    return bool(one == other) or bool(one != one and other != other)


def _state_of(generator: Any) -> object:
    """Return the state of a generator, to be compared."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _frozen(generator.bit_generator.state)
    return _frozen(generator.get_state(legacy=False))


def _frozen(state: Any) -> object:
    """Return the numbers of a state as values that can be compared."""
    if isinstance(state, dict):
        return [(key, _frozen(value)) for key, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


# --- The state that is put back ----------------------------------------------


class KeptState:
    """All that a model can reach beside its parameters, to be put back.

    What holds other things gets the same objects again, and their numbers are
    written into the memory that they had.
    """

    def __init__(self, model: Any):
        walk = Walk(model)
        self.tensors, self.unread = walk.tensors, walk.unread
        self.contents = [
            (holder, holder.read())
            for holder in walk.holders
            if holder.write is not None
        ]
        self.buffers = [
            held
            for module in getattr(model, "modules", list)()
            if (held := module._buffers) is not None
        ]
        weights = [t for t in walk.tensors.values() if _is_weight(t)]
        self.memory = _Memory(walk.tensors, weights, self.unread)
        self.small = [
            t
            for t in walk.tensors.values()
            if isinstance(t, nn.Parameter) and not _is_weight(t)
        ]
        self.arrays = [
            (held, held.copy())
            for name, held in walk.arrays.items()
            if held.flags.writeable and self._has_room(name, held)
        ]
        self.generators = [(g, _restorer(g)) for g in walk.generators.values()]
        self.versions = self._versions()

    def put_back(self, always: bool = False) -> None:
        """Put all of it back, always or if any buffer was changed.

        All, as a table that a forward fills comes with a number that says
        how far.
        """
        if not always and self.versions == self._versions():
            return
        for holder, saved in self.contents:
            now = holder.read()
            same = len(now) == len(saved)
            same = same and all(
                map(operator.is_, now.values(), saved.values())
            )
            if holder.write and not (same and [*now] == [*saved]):
                try:
                    holder.write(saved)
                except Exception:  # code of the model's author runs there
                    self.unread[holder.path] = "not put back"
        self.memory.put_back()
        for array_, copied in self.arrays:
            array_[...] = copied
        for _, restore in self.generators:
            restore()
        self.versions = self._versions()

    def _has_room(self, name: str, held: np.ndarray) -> bool:
        if held.nbytes > MOST_BYTES:
            self.unread[name] = TOO_MANY
            return False
        return True

    def reseed(self, seed: int) -> None:
        """Let the generators that the model holds draw other numbers."""
        for generator, _ in self.generators:
            _reseed(generator, seed)

    def _versions(self) -> list[tuple[int, int]]:
        tensors = [b for held in self.buffers for b in held.values()]
        return [
            (id(t), -1 if t.is_inference() else t._version)
            for t in (*tensors, *self.small)
            if t is not None
        ]


class _Memory:
    """The memory of tensors, each part once, and their shapes."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        weights: list[Tensor],
        unread: dict[str, str],
    ):
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.shapes: list[tuple[Tensor, tuple[Any, ...]]] = []
        done = {s.data_ptr() for w in weights for s in _storages(w)}
        room = MOST_BYTES
        for name, tensor in tensors.items():
            if _is_weight(tensor):
                continue
            for storage in _storages(tensor):
                if storage.data_ptr() in done or not storage.nbytes():
                    continue
                done.add(storage.data_ptr())
                room -= storage.nbytes()
                if room < 0:
                    unread[name] = TOO_MANY
                    continue
                empty = torch.empty(
                    0, dtype=torch.uint8, device=storage.device
                )
                try:
                    memory = empty.set_(storage)
                    self.kept.append((memory, memory.clone()))
                except Exception:  # another kind of device
                    unread[name] = str(storage.device)
            if type(tensor) is Tensor and _storages(tensor):
                self.shapes.append((tensor, _shape_of(tensor)))

    def put_back(self) -> None:
        """Write the numbers back, and shapes that were changed in place."""
        for memory, numbers in self.kept:
            storage, size = memory.untyped_storage(), numbers.numel()
            if storage.nbytes() < size:  # it was resized in place
                storage.resize_(size)
            memory.set_(storage)
            memory[:size].copy_(numbers)
        for tensor, shape in self.shapes:
            if _shape_of(tensor) != shape:
                with suppress(Exception), torch.no_grad():
                    tensor.set_(tensor.untyped_storage(), *shape)


def _shape_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.size()), tensor.stride()


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the memory of a tensor's parts; none of what has no numbers."""
    found = []
    with suppress(Exception):
        for part in parts_of(local(tensor)):
            if part.layout == torch.strided and not part.is_meta:
                found.append(part.untyped_storage())
    return found


def _restorer(generator: Any) -> Callable[[], Any]:
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    state = generator.get_state()
    return partial(generator.set_state, state)


def _reseed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


# --- Copies that share memory ------------------------------------------------


def parted_by_copy(
    model: nn.Module, copied: nn.Module
) -> tuple[list[Tensor], str]:
    """Return tensors that a copy would part from a function that reads them.

    And why the model cannot be copied: a function reads a parameter of the
    original, or an attribute is a view of one; or "".
    """
    memory = defaultdict[int, list[Tensor]](list)
    weights = dict[int, str]()
    own = Walk(model, by_code=False).tensors
    for name, tensor in own.items():
        for storage in _storages(tensor):
            memory[storage.data_ptr()].append(tensor)
            if isinstance(tensor, nn.Parameter):
                weights[storage.data_ptr()] = name
    memory.pop(0, None)  # of what has no numbers
    for name, tensor in own.items():
        if not isinstance(tensor, nn.Parameter):
            for at in {s.data_ptr() for s in _storages(tensor)} & {*weights}:
                return [], f"{name} is a view of {weights[at]}"
    parted = list[Tensor]()
    for tensor in Walk(copied).tensors.values():
        for at in {s.data_ptr() for s in _storages(tensor)} & {*memory}:
            if at in weights:
                return [], f"a copy's function reads {weights[at]} still"
            parted += memory[at]
    return parted, ""
