"""A mode that sees each operation that PyTorch runs.

Tensors of a class of their own (quantised, or laid out by a library) copy and
compute by that class; the kit changes none of them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)

from .places import find_place
from .ranks import local

FAKE = torch._C._TorchDispatchModeKey.FAKE
Observer = Callable[[Any, str, tuple[Any, ...], dict[str, Any]], Any]
Seen = TypeVar("Seen", bound=Observer)


class Operations(TorchDispatchMode):
    """Base of what sees each operation inside.

    Nothing is compiled there: dynamo, which would take a second, stays out.
    """

    # flex_attention and its like: each runs as one operation
    supports_higher_order_operators = True

    sees: tuple[type, ...] = ()  # classes of tensors that it computes itself

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a class of tensors compute first: a mode sees how it does."""
        super().__init_subclass__(**options)
        carry_out = cls.__torch_dispatch__

        @wraps(carry_out)
        def dispatch(self, func, types, args=(), kwargs=None):
            if torch._C._get_dispatch_mode(FAKE) is not None:
                return func(*args, **(kwargs or {}))  # DTensor asks a shape
            if any(not (k in cls.sees or is_plain(k)) for k in types):
                return NotImplemented
            return carry_out(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class _Each(Operations):
    def __init__(self, observer: Observer):
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "overloadpacket", func).__name__
        return self.observer(func, name, args, kwargs or {})


class _EachFunction(TorchFunctionMode):
    def __init__(self, observer: Observer):
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        return self.observer(func, name, args, kwargs or {})


def arguments_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operation by their names."""
    schema = getattr(func, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    return dict(zip(names, args, strict=False)) | dict(kwargs)


@contextmanager
def operations_through(observer: Seen) -> Iterator[Seen]:
    """Hand each operation inside to an observer, which carries it out.

    It is called with the operation, its name, its arguments and its keywords,
    and returns the result.
    """
    with _Each(observer):
        yield observer


@contextmanager
def functions_through(observer: Seen) -> Iterator[Seen]:
    """Hand each of torch's functions to an observer, as above."""
    with _EachFunction(observer):
        yield observer


@contextmanager
def below_autograd() -> Iterator[None]:
    """Let operations inside reach a mode whole, as linear, and one by one.

    Autograd would take them apart, and the fused layers of torch's own
    Transformer would hide them. What a model caches meanwhile can be
    trained with later, which it cannot be after torch.inference_mode.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


HOOKS = ("__torch_dispatch__", "__torch_function__")  # of a class's own


def is_plain(kind: type[Tensor]) -> bool:
    """Whether a class of tensors computes as torch's own does."""
    return all(_hook(kind, name) in OWN for name in HOOKS)


def _hook(kind: type[Tensor], name: str) -> Any:
    hook = getattr(kind, name)
    return getattr(hook, "__func__", hook)


OWN = [_hook(kind, n) for kind in (Tensor, nn.Parameter) for n in HOOKS]


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that one is made of: itself, if it is one."""
    if is_plain(type(tensor)):
        return [tensor]
    names = [*vars(tensor)]
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
    held = [getattr(tensor, name) for name in names]
    held = [part for part in held if isinstance(part, Tensor)]
    return [part for whole in held for part in parts_of(whole)]


def quantised(model: Any) -> str:
    """Return what says that a model is quantised, or "".

    Weights of a class of their own, or torch.ao's quantised modules, whose
    packed weights are not tensors.
    """
    if not isinstance(model, nn.Module):
        return ""
    for module in model.modules():
        if ".quantized." in f"{type(module).__module__}.":
            return f"{type(module).__name__} is quantised"
    for name, weight in model.named_parameters():
        if not is_plain(type(local(weight))):
            return f"{name} is a {type(weight).__name__}"
    return ""


# --- As it is written, or as its user compiled it ----------------------------

DYNAMO = "torch._dynamo"  # nothing is compiled where it is not imported
FLEX = "torch.nn.attention.flex_attention"  # it compiles its own operator


@contextmanager
def as_written() -> Iterator[None]:
    """Run what is compiled as it is written: modes and hooks see it."""
    if DYNAMO in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def as_compiled() -> Iterator[None]:
    """Run what is compiled so, in a program that compiles nothing else again.

    No mode may see it: dynamo would leave such a frame to Python for ever.

    Raises:
        RuntimeError: for a frame that would be compiled once more than
            dynamo's limit, and run as it is written.
    """
    import torch._dynamo.config as config

    limit = {"fail_on_recompile_limit_hit": True}
    with (
        _disable_current_modes(),
        torch.compiler.set_stance("default"),
        config.patch(limit),
    ):
        yield


def compiled_frames() -> int:
    """Return how many frames dynamo has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["frames"]["ok"]


@contextmanager
def calls_seen_by(
    look: Callable[[FrameType, str, Any], None],
) -> Iterator[None]:
    """Tell a function of each call of Python's inside, as sys.setprofile."""
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def runs_compiled(call: Callable[[], Any]) -> bool:
    """Whether a call reaches what torch.compile made, whatever its stance."""
    if DYNAMO not in sys.modules:
        return False
    found = False

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        if event == "call" and frame.f_code.co_name == "compile_wrapper":
            caller = frame.f_back
            names = caller.f_globals if caller is not None else {}
            found |= names.get("__name__") != FLEX

    with calls_seen_by(look):
        call()
    return found


@contextmanager
def flex_as_written() -> Iterator[None]:
    """Run an uncompiled flex_attention as one operation, which modes see.

    Otherwise dynamo would trace the mode. Each mask that is made inside
    notes the line that makes it, and whether torch chose its blocks.
    """
    flex: Any = sys.modules.get(FLEX)
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if not hasattr(flex, name):
        yield
        return
    before, make = getattr(flex, name), flex.BlockMask.__init__

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        _, by_torch = getattr(self.kv_num_blocks, "made", (None, False))
        while frame is not None and frame.f_globals.get("__name__") == FLEX:
            by_torch |= frame.f_code.co_name == "create_block_mask"
            frame = frame.f_back
        self.kv_num_blocks.made = find_place("BlockMask"), by_torch

    try:
        setattr(flex, name, True)
        flex.BlockMask.__init__ = made
        yield
    finally:
        setattr(flex, name, before)
        flex.BlockMask.__init__ = make


def lists_of(blocks: tuple[Any, ...]) -> list[Tensor]:
    """Return the lists of blocks that no line of torch's made."""
    _, by_torch = getattr(blocks[2], "made", (None, False))
    lists = [] if by_torch else blocks[2:6]
    return [part for part in lists if isinstance(part, Tensor)]


# --- An operation: its name, its tensors, what it writes ---------------------

# fully_shard has some of torch's operations under another name
TORCHS_OWN = ("aten", "prims", "fsdp")
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def tensors_in(values: Iterable[Any], lost: bool = False) -> list[Tensor]:
    """Return the tensors in arguments; lost: those that carry no codes."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if lost == (value.layout != torch.strided):
                found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value, lost)
    return found


def written_by(func, args, kwargs) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    schema = zip(func._schema.arguments, args, strict=False)
    given = {a.name: value for a, value in schema} | kwargs
    return tensors_in(
        given.get(a.name)
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    )


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is made of others by its definition."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), COMPOSITE
    )


@cache
def is_view(func: Any) -> bool:
    """Whether all results of an operation of torch's share their numbers."""
    schema = func._schema
    shared = bool(schema.returns) and all(r.alias_info for r in schema.returns)
    shared |= schema.name == "aten::_unsafe_view"
    written = schema.is_mutable or is_composite(func)
    return shared and not written and func.namespace == "aten"


@cache
def base_name(func: Any) -> str:
    """Return an operation's name without the mark of an in-place one.

    One of another namespace than torch's keeps it: a user's `audit::cumsum`
    is not `cumsum`.
    """
    name = func.overloadpacket.__name__
    if name.endswith("_") and name[-2:] != "__":
        name = name[:-1]
    return (
        name if func.namespace in TORCHS_OWN else f"{func.namespace}::{name}"
    )


# They hold whatever the memory held, until it is written.
UNSET = (
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
)
