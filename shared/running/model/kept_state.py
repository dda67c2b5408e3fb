"""Compare the state of a model by name, and restore it.

A KeptState restores the same objects, and writes their old values into their
memory. If a buffer were replaced by a copy, functions, hooks and views would
still read the changed buffer.
"""

import operator
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..operations import parts_of
from ..ranks import local
from .reach import CALLABLE, GENERATORS, HOOKS, PLAIN, Walk

SMALL = 4096  # a frozen parameter up to this size belongs to the state
LONG_LIST = 1000  # the plain values of a longer container are compared as one
MOST_BYTES = 1 << 30  # most bytes of memory that are kept
TOO_MANY = "more numbers than the kit keeps"
NOT_PUT_BACK = "not put back"

# --- Values ------------------------------------------------------------------

Values = dict[str, Any]


@dataclass(frozen=True)
class KeyOrder:
    """The order of a dict's keys, by their names."""

    names: tuple[str, ...]

    def is_like(self, other: "KeyOrder") -> bool:
        """Return whether the keys that both have are in the same order."""
        both = {*self.names} & {*other.names}
        orders = ([n for n in o.names if n in both] for o in (self, other))
        return next(orders) == next(orders)


@dataclass(frozen=True)
class Drawn:
    """The state of a generator of Python or NumPy."""

    state: object


def values_of(model: Any, for_later: bool = True) -> Values:
    """Return all values that a model can reach, by name.

    Parameters are left out, because a forward does not train them.

    Args:
        model: the model.
        for_later: True if the values will be compared after later calls; then
            tensors and arrays are copied. False if they are compared at once
            with those of a copy of the model; then names with an id() are left
            out, because a copy has other ids.
    """
    walk, found = Walk(model, by_id=for_later), Values()
    for holder in walk.holders:
        content = holder.read()
        if not for_later:
            content = {
                k: v for k, v in content.items() if not holder.has_an_id(k)
            }
        plain = {k: v for k, v in content.items() if isinstance(v, PLAIN)}
        if holder.ordered and for_later and len(content) <= LONG_LIST:
            order = KeyOrder(tuple(map(holder.name, content)))
            found[f"{holder.path}[its order]"] = order
        if len(plain) > LONG_LIST:  # too many to name each: one name for all
            found[holder.path], plain = [*plain.items()], {}
        for key, value in content.items():
            if key in plain:
                found[holder.name(key)] = value
            elif not isinstance(value, PLAIN):
                found.setdefault(holder.name(key), _kind_of(value))
    for name, tensor in walk.tensors.items():
        with suppress(Exception):
            if not _is_weight(tensor):
                numbers = local(tensor).detach()
                found[name] = _copy_of(numbers) if for_later else numbers
    for name, held in walk.arrays.items():
        if held.nbytes <= MOST_BYTES:
            found[name] = held.copy() if for_later else held
    for name, generator in walk.generators.items():
        if not isinstance(generator, torch.Generator):  # modes see torch draws
            found[name] = Drawn(_state_of(generator))
    return found


def _kind_of(value: Any) -> tuple[type, Any]:
    """Return a value's type, and for a function also its code."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return types.FunctionType, value.__code__
    if isinstance(value, types.BuiltinFunctionType):
        return type(value), value.__qualname__
    return type(value), value if isinstance(value, type) else None


def _copy_of(tensor: Tensor) -> Any:
    """Return a tensor's copy, or for a large tensor its count of writes."""
    if tensor.nbytes > MOST_BYTES and not tensor.is_inference():
        return tensor._version
    return tensor.clone()


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter that the kept state omits."""
    if not isinstance(tensor, nn.Parameter):
        return False
    return tensor.requires_grad or tensor.numel() > SMALL


def changed(before: Values, after: Values) -> list[str]:
    """Return the names of values that differ, in order."""
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
    if isinstance(one, KeyOrder):
        return one.is_like(other)
    if isinstance(one, float):  # 0 and -0 differ, and NaN equals itself
        return one.hex() == other.hex()
    return bool(one == other) or bool(one != one and other != other)


def _state_of(generator: Any) -> object:
    """Return the state of a generator, for comparison."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _frozen(generator.bit_generator.state)
    if isinstance(generator, np.random.BitGenerator):
        return _frozen(generator.state)
    return _frozen(generator.get_state(legacy=False))


def _frozen(state: Any) -> object:
    """Return a generator's state in a form that == can compare."""
    if isinstance(state, dict):
        return [(key, _frozen(value)) for key, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


# --- Restoring the state -----------------------------------------------------


class KeptState:
    """A model's state, without parameters, kept so that it can be restored.

    Containers get back the same objects, and the objects get back their old
    values in place.
    """

    def __init__(self, model: Any):
        walk = Walk(model)
        self.tensors, self.unread = walk.tensors, walk.unread
        self.contents = [
            (holder, holder.read(), {**(holder.whole or {})})
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
            (name, held, held.copy())
            for name, held in walk.arrays.items()
            if held.flags.writeable and self._has_room(name, held)
        ]
        self.generators = [(g, _restorer(g)) for g in walk.generators.values()]
        self.versions = self._versions()

    def put_back(self, always: bool = False) -> None:
        """Restore the whole state; without `always`, only if a buffer changed.

        All values are restored, because some belong together, such as a table
        and the count of its rows.
        """
        if not always and self.versions == self._versions():
            return
        for holder, saved, whole in self.contents:
            same = holder.whole is not None and _is_same(holder.whole, whole)
            if holder.write and not (same or _is_same(holder.read(), saved)):
                try:
                    holder.write(saved)
                except Exception:  # writing may run code of the model's author
                    self.unread[holder.path] = NOT_PUT_BACK
        self.memory.put_back()
        for name, array_, copied in self.arrays:
            try:
                if array_.shape != copied.shape:  # a call changed it in place
                    array_.shape = copied.shape
                array_[...] = copied
            except ValueError:  # it has another size now
                self.unread[name] = NOT_PUT_BACK
        for _, restore in self.generators:
            restore()
        self.versions = self._versions()

    def _has_room(self, name: str, held: np.ndarray) -> bool:
        if held.nbytes > MOST_BYTES:
            self.unread[name] = TOO_MANY
            return False
        return True

    def reseed(self, seed: int) -> None:
        """Reseed the generators that the model holds."""
        for generator, _ in self.generators:
            _reseed(generator, seed)

    def _versions(self) -> list[tuple[int, int]]:
        tensors = [b for held in self.buffers for b in held.values()]
        return [
            (id(t), -1 if t.is_inference() else t._version)
            for t in (*tensors, *self.small)
            if t is not None
        ]


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Return whether a dict has the same keys and the same objects."""
    same = all(map(operator.is_, now.values(), before.values()))
    return len(now) == len(before) and same and [*now] == [*before]


class _Memory:
    """Copies of tensors' memory (shared memory only once), and shapes."""

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
                except Exception:  # memory of this device cannot be copied
                    unread[name] = str(storage.device)
            if type(tensor) is Tensor and _storages(tensor):
                self.shapes.append((tensor, _shape_of(tensor)))

    def put_back(self) -> None:
        """Restore the values, and shapes that were changed in place."""
        for memory, numbers in self.kept:
            storage, size = memory.untyped_storage(), numbers.numel()
            if storage.nbytes() < size:  # a call resized the storage in place
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
    """Return the memory of those parts of a tensor that have memory."""
    found = []
    with suppress(Exception):
        for part in parts_of(local(tensor)):
            if part.layout == torch.strided and not part.is_meta:
                found.append(part.untyped_storage())
    return found


def _restorer(generator: Any) -> Callable[[], Any]:
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.BitGenerator | np.random.Generator):
        bits: Any = getattr(generator, "bit_generator", generator)
        return partial(setattr, bits, "state", bits.state)
    state = generator.get_state()
    return partial(generator.set_state, state)


def _reseed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.BitGenerator | np.random.Generator):
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


# --- Copies that share memory ------------------------------------------------


def parted_by_copy(
    model: nn.Module, copied: nn.Module
) -> tuple[list[Any], str]:
    """Return the objects that a model must share with its copy.

    Functions of the copy still read these objects of the original. Also return
    why the model cannot be copied, or "". It cannot if such a function reads a
    parameter, or if an attribute is a view of a parameter.
    """
    memory = defaultdict[int, list[Tensor]](list)
    weights = dict[int, str]()
    own = Walk(model, by_code=False)
    for name, tensor in own.tensors.items():
        for storage in _storages(tensor):
            memory[storage.data_ptr()].append(tensor)
            if isinstance(tensor, nn.Parameter):
                weights[storage.data_ptr()] = name
    memory.pop(0, None)  # address 0: tensors without memory
    for name, tensor in own.tensors.items():
        if not isinstance(tensor, nn.Parameter):
            for at in {s.data_ptr() for s in _storages(tensor)} & {*weights}:
                return [], f"{name} is a view of {weights[at]}"
    walk = Walk(copied)
    parted, why = _parted_objects(own, walk)
    if why:
        return [], why
    for tensor in walk.tensors.values():
        for at in {s.data_ptr() for s in _storages(tensor)} & {*memory}:
            if at in weights:
                return [], f"a copy's function reads {weights[at]} still"
            parted += memory[at]
    return parted, ""


def _parted_objects(own: Walk, copied: Walk) -> tuple[list[Any], str]:
    """Return objects of the original that functions of a copy still read.

    Also return why the model cannot be copied, if an object holds a module.
    """
    both = own.visited.keys() & copied.visited.keys()
    parted = [v for v in map(own.visited.get, both) if _may_change(v)]
    for value in parted:
        inner = Walk(value, by_code=False).visited.values()
        if any(isinstance(part, nn.Module) for part in inner):
            kind = type(value).__name__
            return [], f"a copy's function reads a {kind} of the original"
    return parted, ""


CONTAINERS = dict, list, set, deque, np.ndarray, *GENERATORS
ATOMIC = nn.Module, Tensor, type, *CALLABLE


def _may_change(value: Any) -> bool:
    """Return whether a value can change, and is copied with the model."""
    if isinstance(value, CONTAINERS):
        return True
    return not isinstance(value, ATOMIC) and hasattr(value, "__dict__")


def other_in_copy(model: nn.Module, copied: nn.Module) -> str:
    """Return the name of a value in which a copy differs from a model, or "".

    A class that defines its own copying may leave some attributes out, or
    build them again. Functions are compared by their code.
    """
    parts = zip(model.named_modules(), copied.named_modules(), strict=False)
    for (name, one), (_, other) in parts:
        if type(one).__module__.startswith("torch."):
            continue
        if type(one) is not type(other):
            return name or "its class"
        for key in HOOKS:
            first, second = (
                [_kind_of(hook) for hook in getattr(m, key).values()]
                for m in (one, other)
            )
            if first != second:
                return f"a hook of {name or 'the model'}"
    both = (values_of(part, for_later=False) for part in (model, copied))
    return next(iter(changed(*both)), "")
