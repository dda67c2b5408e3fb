"""Numbers that leave torch: in texts, lists, storages and scripts."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..names import KIT
from ..running.context import of_a_type_checker
from ..running.operations import flex_as_written, is_plain, tensors_in
from .codes import LONGEST
from .shadows import BY_SIZES, Shadows

TEXTS = ("tolist", "__repr__", "__str__")
LEAVES = ("numpy", "__array__", "__dlpack__", "data_ptr")
# They call a function of Python's for each number.
BY_PYTHON = ("apply_", "map_", "map2_")
# A storage for which others than the kit ask: torch.save, pickle, ctypes.
STORAGES = ("untyped_storage", "storage", "_typed_storage")
# They read tensors in lists without an operation.
FROM_LISTS = ("tensor", "as_tensor", "asarray", "new_tensor", "new")
NUMBERS = ("__index__", "__int__", "__float__", "__complex__", "__bool__")


@contextmanager
def followed(shadows: Shadows) -> Iterator[None]:
    """Follow all operations inside."""
    outer = flex_as_written(), _scripts_seen(shadows)
    with outer[0], outer[1], _Leaving(shadows), shadows:
        yield


class _Leaving(TorchFunctionMode):
    """Notes tensors that are turned into numbers of Python's or NumPy's.

    It also copies codes where copy.deepcopy copies a storage, which is not an
    operation.
    """

    def __init__(self, shadows: Shadows):
        super().__init__()
        self.shadows = shadows

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__deepcopy__" and is_plain(type(args[0])):
            with _disable_current_modes():
                made = func(*args)
                self.shadows.copied(args[0], made)
            return made
        if name in TEXTS or name in LEAVES:
            self._read(name, tensors_in(args[:1]), name in LEAVES)
        elif name in STORAGES and not _is_ours(sys._getframe(1)):
            self._read(name, tensors_in(args[:1]), True)
        elif name in BY_PYTHON:
            self._read(name, tensors_in(args), True)
        elif name in FROM_LISTS:
            given = filter(_is_list, (*args, *kwargs.values()))
            self._read(name, [*_tensors_within(given)])
        elif name in BY_SIZES:
            self._read(name, tensors_in((*args[1:], *kwargs.values())))
        elif name in NUMBERS and not _is_ours(sys._getframe(1)):
            return self._number(func, name, args)
        elif "out" in kwargs:
            return self._into(func, args, kwargs)
        return func(*args, **kwargs)

    def _read(self, name: str, tensors: list[Tensor], left: bool = False):
        with _disable_current_modes():
            self.shadows.read(name, tensors, left)

    def _number(self, func, name, args):
        """Read a number, unless an operation is seen that reads it."""
        before = self.shadows.times_read
        number = func(*args)
        if self.shadows.times_read == before:
            self._read(name, tensors_in(args))
        return number

    def _into(self, func, args, kwargs):
        """Let `out` depend on everything if no operation is seen to write it.

        A composite operation may return another tensor under a mode.
        """
        outs = tensors_in((kwargs["out"],))
        state = self.shadows.storages.state
        with _disable_current_modes():
            before = [state(out) for out in outs]
        result = func(*args, **kwargs)
        with _disable_current_modes():
            for out, was in zip(outs, before, strict=True):
                if state(out) == was:
                    self.shadows.mark(out, LONGEST)
        return result


def _is_list(value: Any) -> bool:
    """Whether torch reads a value as a list: a deque is one as well."""
    if isinstance(value, Tensor | str | bytes | dict | np.ndarray):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _tensors_within(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in nested lists of any kind."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif _is_list(value):
            yield from _tensors_within([*value])


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the kit calls, maybe through a checker of types."""
    while frame and of_a_type_checker(frame.f_code.co_filename):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame else ""
    return name.startswith(f"{KIT}.")


# --- Scripted code -----------------------------------------------------------

# Each gives a number of a tensor by an operation that modes see ...
SEEN = {"Bool", "Int", "Float", "Complex", "item", "equal", "is_nonzero"}
SEEN |= {"IntImplicit", "FloatImplicit", "ComplexImplicit", "ScalarImplicit"}
# ... asks for what no number decides, or holds other nodes.
SHAPES = {"size", "dim", "len", "numel", "stride", "is_floating_point"}
SHAPES |= {"is_complex", "is_contiguous", "__is__", "__isnot__", "device"}
SHAPES |= {"dtype", "layout", "shape", "requires_grad", "isinstance"}
HOLDERS = {"If", "Loop", "RaiseException", "PythonOp", "SetAttr", "Return"}


@contextmanager
def _scripts_seen(shadows: Shadows) -> Iterator[None]:
    """Note each call of scripted code that reads numbers unseen by modes."""

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(scripted: Any, *args: Any, **kwargs: Any) -> Any:
            if reader := unseen_reader(scripted):
                with _disable_current_modes():
                    given = tree_leaves((args, kwargs))
                    shadows.read(reader, tensors_in(given))
            return call(scripted, *args, **kwargs)

        return run

    kinds: tuple[Any, ...] = (torch.jit.ScriptFunction, torch.ScriptMethod)
    calls = [kind.__call__ for kind in kinds]
    try:
        for kind, call in zip(kinds, calls, strict=True):
            kind.__call__ = noting(call)
        # its optimizer would fuse operations after a few calls
        with torch.jit.optimized_execution(False):
            yield
    finally:
        for kind, call in zip(kinds, calls, strict=True):
            kind.__call__ = call


def unseen_reader(scripted: Any) -> str:
    """Return what in scripted code reads numbers unseen by modes, or ""."""
    try:
        nodes = [*_nodes(scripted.inlined_graph)]
    except Exception:  # it does not show its graph
        return "a script"
    for node in nodes:
        kind = str(node.kind())
        if kind.partition("::")[2] in SEEN | SHAPES | HOLDERS:
            continue
        made = [*node.outputs()]
        tensors = bool(made) and all(map(_has_tensor, made))
        if any(map(_has_tensor, node.inputs())) and not tensors:
            return kind
    return ""


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _has_tensor(value: Any) -> bool:
    return "Tensor" in str(value.type())
