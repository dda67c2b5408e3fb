"""Note where tensor entries leave torch and lose their codes."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, _tensor_str
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
# Methods of tensors that call a given Python function for each entry.
BY_PYTHON = ("apply_", "map_", "map2_")
# Methods that return storages, for torch.save, pickle and ctypes.
STORAGES = ("untyped_storage", "storage", "_typed_storage")
# A TorchFunctionMode does not see calls of these methods that a hook, a
# callback or torch makes inside a torch function. So the kit wraps them.
WRAPPED = ("tolist", *LEAVES, *BY_PYTHON, "_typed_storage", "new_tensor")
# Functions that read tensors in a list without running an operation.
FROM_LISTS = {"tensor", "as_tensor", "asarray", "new_tensor", "new"}
FROM_LISTS |= {"sparse_coo_tensor", "sparse_compressed_tensor"}
FROM_LISTS |= {f"sparse_{n}_tensor" for n in ("csr", "csc", "bsr", "bsc")}
INDEXED = ("__getitem__", "__setitem__")
LONG = 32  # torch reads a shorter list of tensors as a tuple of indices
NUMBERS = ("__index__", "__int__", "__float__", "__complex__", "__bool__")
WATCHED = {"__deepcopy__", *TEXTS, *LEAVES, *BY_PYTHON, *STORAGES}
WATCHED |= {*FROM_LISTS, *INDEXED, *BY_SIZES, *NUMBERS, "one_hot"}
# The runs that carry codes now. Wrapped methods report to the last one, which
# is the innermost.
FOLLOWED: list["_Leaving"] = []


@contextmanager
def codes_carried(shadows: Shadows) -> Iterator[None]:
    """Let each operation in the `with` block carry dependency codes."""
    leaving = _Leaving(shadows)
    FOLLOWED.append(leaving)
    try:
        outer = flex_as_written(), _scripts_seen(), _methods_seen()
        with outer[0], outer[1], outer[2], leaving, shadows:
            yield
    finally:
        FOLLOWED.pop()


class _Leaving(TorchFunctionMode):
    """Notes tensors whose entries become Python or NumPy numbers.

    It also copies the codes when copy.deepcopy copies a storage, because no
    operation runs that could carry them.
    """

    def __init__(self, shadows: Shadows):
        super().__init__()
        self.shadows = shadows
        self.copies = False  # whether copy.deepcopy is copying a tensor now

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is F.multi_head_attention_forward and not kwargs["training"]:
            # torch's fused layer, which no mode sees, reads the mask instead
            hint = kwargs["is_causal"] and kwargs["attn_mask"] is None
            return func(*args, **kwargs | {"is_causal": hint})
        if name not in WATCHED and "out" not in kwargs:
            return func(*args, **kwargs)
        if name == "__deepcopy__" and is_plain(type(args[0])):
            return self._copy(func, *args)
        # the kit itself calls these methods as well
        also_ours = name in STORAGES or name in NUMBERS
        if also_ours and _is_ours(sys._getframe(1)):
            return func(*args, **kwargs)
        if name in NUMBERS:
            return self._number(func, name, args)
        if name not in WATCHED:
            return self._into(func, args, kwargs)
        if name == "one_hot":
            return self._one_hot(func, args, kwargs)
        self.look(name, args, kwargs)
        return func(*args, **kwargs)

    def look(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the tensors whose numbers a watched function reads."""
        if name in FROM_LISTS:
            given = filter(_is_list, (*args, *kwargs.values()))
            self._read(name, [*_tensors_within(given)])
        elif name in INDEXED:
            self._read(name, [*_tensors_within(_lists_of(args[1]))])
        elif name in BY_SIZES:
            self._read(name, tensors_in((*args[1:], *kwargs.values())))
        else:
            given = args if name in BY_PYTHON else args[:1]
            self._read(name, tensors_in(given), name not in TEXTS)

    def _copy(self, func: Any, tensor: Tensor, *memo: Any) -> Tensor:
        """Return a deep copy of a tensor, with its dependency codes."""
        before, self.copies = self.copies, True
        try:
            with _disable_current_modes():
                made = func(tensor, *memo)
                self.shadows.copied(tensor, made)
        finally:
            self.copies = before
        return made

    def _read(self, name: str, tensors: list[Tensor], left: bool = False):
        with _disable_current_modes():
            self.shadows.read(name, tensors, left)

    def _number(self, func, name, args):
        """Record that Python reads a number, if no operation records it."""
        before = self.shadows.times_read
        number = func(*args)
        if self.shadows.times_read == before:
            self._read(name, tensors_in(args))
        return number

    def _one_hot(self, func, args, kwargs):
        """Run one_hot, and note if it reads the ids.

        Given a number of classes, torch only checks the ids. This counts only
        if it raises. Without that number, torch reads the largest id.
        """
        given = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        self.shadows.checks = isinstance(given, int) and given > 0
        try:
            return func(*args, **kwargs)
        except Exception:
            self.shadows.checks = False
            self._read("one_hot", tensors_in((*args, *kwargs.values())))
            raise
        finally:
            self.shadows.checks = False

    def _into(self, func, args, kwargs):
        """Run a function; if no operation writes to `out`, assume the worst.

        Under a torch mode, a composite operation may write to another tensor
        instead. Then `out` counts as depending on every token.
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
    """Return whether torch reads a value like a list, for example a deque."""
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
        elif any(hasattr(type(value), name) for name in NUMBERS[:-1]):
            # torch calls this method, unseen by its modes
            yield from tensors_in(getattr(value, "__dict__", {}).values())


def _lists_of(index: Any) -> list[Any]:
    """Return the lists in an index that torch will turn into tensors."""
    if not _is_list(index):
        return []
    if not isinstance(index, tuple) and len(index) >= LONG:
        return [index]
    return [part for part in index if _is_list(part)]


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether the caller is the kit, perhaps via a type checker."""
    while frame and of_a_type_checker(frame.f_code.co_filename):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame else ""
    return name.startswith(f"{KIT}.")


# --- Methods that a torch function calls, unseen by a function mode ----------


@cache
def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of tensors, wrapped so that it reports its calls."""

    @wraps(method)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        leaving, frame = FOLLOWED[-1], sys._getframe(1)
        if not (leaving.copies or _is_noted(frame) or _is_ours(frame)):
            with torch._C.DisableTorchFunction():
                leaving.look(name, (tensor, *args), kwargs)
        return method(tensor, *args, **kwargs)

    return run


@contextmanager
def _methods_seen() -> Iterator[None]:
    """Record all calls of the methods by which numbers leave torch."""
    inherited = [name for name in WRAPPED if name not in vars(Tensor)]
    methods = {name: getattr(Tensor, name) for name in WRAPPED}
    text = _tensor_str._str
    try:
        for name, method in methods.items():
            setattr(Tensor, name, _noting(name, method))
        _tensor_str._str = _noting("__repr__", text)
        yield
    finally:
        _tensor_str._str = text
        for name, method in methods.items():
            setattr(Tensor, name, method)
        for name in inherited:
            delattr(Tensor, name)


def _is_noted(frame: FrameType) -> bool:
    """Return whether the caller is a method that is already noted."""
    code = frame.f_code
    return (
        code.co_filename == _tensor_str.__file__
        or code is Tensor.__array__.__wrapped__.__code__  # type: ignore
    )


# --- Scripted code -----------------------------------------------------------

# TorchScript nodes that read a tensor in a way that torch modes see.
SEEN = {"Bool", "Int", "Float", "Complex", "item", "equal", "is_nonzero"}
SEEN |= {"IntImplicit", "FloatImplicit", "ComplexImplicit", "ScalarImplicit"}
# TorchScript nodes that read no tensor entries, or only contain other nodes.
SHAPES = {"size", "dim", "len", "numel", "stride", "is_floating_point"}
SHAPES |= {"is_complex", "is_contiguous", "__is__", "__isnot__", "device"}
SHAPES |= {"dtype", "layout", "shape", "requires_grad", "isinstance"}
HOLDERS = {"If", "Loop", "RaiseException", "PythonOp", "SetAttr", "Return"}


@cache
def _noting_script(kind: Any) -> Callable[..., Any]:
    """Return `__call__` of scripted code, wrapped to report what it reads."""
    call = kind.__call__

    @wraps(call)
    def run(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        if reader := unseen_reader(scripted):
            with _disable_current_modes():
                given = tree_leaves((args, kwargs))
                FOLLOWED[-1].shadows.read(reader, tensors_in(given))
        return call(scripted, *args, **kwargs)

    return run


@contextmanager
def _scripts_seen() -> Iterator[None]:
    """Record calls of scripted code whose reads torch modes do not see."""
    kinds: tuple[Any, ...] = (torch.jit.ScriptFunction, torch.ScriptMethod)
    calls = [kind.__call__ for kind in kinds]
    try:
        for kind in kinds:
            kind.__call__ = _noting_script(kind)
        # unoptimized, because torch modes do not see fused operations
        with torch.jit.optimized_execution(False):
            yield
    finally:
        for kind, call in zip(kinds, calls, strict=True):
            kind.__call__ = call


def unseen_reader(scripted: Any) -> str:
    """Return a node that reads a tensor unseen by torch modes, or ""."""
    try:
        nodes = [*_nodes(scripted.inlined_graph)]
    except Exception:  # scripted code without a graph
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
