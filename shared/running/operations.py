"""Observe each operation that PyTorch runs, in a torch dispatch mode.

A tensor of a subclass (quantised, or in a library's layout) is copied and
computed by its own class. The kit does not change its entries.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
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
    """Base class of torch modes that observe each operation in their body.

    Nothing is compiled in the body, because importing dynamo, torch's
    compiler, would take a second.
    """

    # run a higher-order operator such as flex_attention as one operation
    supports_higher_order_operators = True

    sees: tuple[type, ...] = ()  # tensor classes that the mode handles

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        """Let tensors of an unknown class run an operation before the mode."""
        super().__init_subclass__(**options)
        carry_out = cls.__torch_dispatch__

        @wraps(carry_out)
        def dispatch(self, func, types, args=(), kwargs=None):
            if torch._C._get_dispatch_mode(FAKE) is not None:
                return func(*args, **(kwargs or {}))  # DTensor infers shapes
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
    """Return the arguments of an operation by name."""
    schema = getattr(func, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    return dict(zip(names, args, strict=False)) | dict(kwargs)


@contextmanager
def operations_through(observer: Seen) -> Iterator[Seen]:
    """Pass each operation to an observer, which runs it.

    The observer gets the operation, its name, arguments and keywords, and
    returns the result.
    """
    with _Each(observer):
        yield observer


@contextmanager
def functions_through(observer: Seen) -> Iterator[Seen]:
    """Pass each torch function in the body to an observer, which runs it."""
    with _EachFunction(observer):
        yield observer


@contextmanager
def below_autograd() -> Iterator[None]:
    """Let modes observe each operation as the model calls it.

    Autograd would split some operations (linear), and the fused layers of
    torch's Transformer would hide others. Unlike in torch.inference_mode,
    tensors that a model caches meanwhile can be used in training.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


# methods by which a class of tensors computes in its own way
HOOKS = ("__torch_dispatch__", "__torch_function__")


def is_plain(kind: type[Tensor]) -> bool:
    """Return whether a class of tensors computes as torch.Tensor does."""
    return all(_hook(kind, name) in OWN for name in HOOKS)


def _hook(kind: type[Tensor], name: str) -> Any:
    hook = getattr(kind, name)
    return getattr(hook, "__func__", hook)


OWN = [_hook(kind, n) for kind in (Tensor, nn.Parameter) for n in HOOKS]


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a tensor, or the tensor itself."""
    if is_plain(type(tensor)):
        return [tensor]
    names = [*vars(tensor)]
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
    held = [getattr(tensor, name) for name in names]
    held = [part for part in held if isinstance(part, Tensor)]
    return [part for whole in held for part in parts_of(whole)]


def quantised(model: Any) -> str:
    """Return why a model counts as quantised, or "".

    A weight has a class that is not torch's, or a module of torch.ao is
    quantised, whose packed weights are not tensors.
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


# --- Uncompiled and compiled -------------------------------------------------

DYNAMO = "torch._dynamo"  # nothing compiles before this module's import
FLEX = "torch.nn.attention.flex_attention"  # compiles its own operator


@contextmanager
def as_written() -> Iterator[None]:
    """Run compiled code without compilation, so that modes observe it."""
    if DYNAMO in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def as_compiled() -> Iterator[None]:
    """Let torch.compile take effect, under any stance that the user set.

    Torch modes are off in the body, because an active mode makes dynamo run
    the frame uncompiled from then on.

    Raises:
        RuntimeError: if a frame would run uncompiled, beyond dynamo's compile
            limit.
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
    """Pass each Python call in the body to a function, by sys.setprofile."""
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def runs_compiled(call: Callable[[], Any]) -> bool:
    """Return whether a call runs compiled code, under any dynamo stance."""
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
    """Let modes see an uncompiled flex_attention as a single operation.

    Otherwise dynamo would trace the kit's mode. Each mask made in the body
    records the line that makes it, and whether torch chose its blocks.
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
    """Return the tensors of a BlockMask's lists, or [] if torch made them."""
    _, by_torch = getattr(blocks[2], "made", (None, False))
    lists = [] if by_torch else blocks[2:6]
    return [part for part in lists if isinstance(part, Tensor)]


# --- An operation: its name, its tensors, what it writes ---------------------

# namespaces of torch's operations; fully_shard copies some into "fsdp"
TORCHS_OWN = ("aten", "prims", "fsdp")
# dispatch keys of kernels that torch prefers to a composite one
KERNELS = (
    *("CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA"),
    "CompositeExplicitAutograd",
)
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def tensors_in(values: Iterable[Any], lost: bool = False) -> list[Tensor]:
    """Return the strided tensors in arguments, or with `lost` the others."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if lost == (value.layout != torch.strided):
                found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value, lost)
        elif isinstance(value, dict):
            found += tensors_in(value.values(), lost)
    return found


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is defined by other operations.

    An author's operation may have a faster kernel as well, which then runs.
    """
    has_kernel = partial(
        torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    )
    if func.namespace not in TORCHS_OWN and any(map(has_kernel, KERNELS)):
        return False
    return has_kernel(COMPOSITE)


@cache
def is_view(func: Any) -> bool:
    """Return whether all results of an operation are views of arguments."""
    schema = func._schema
    shared = bool(schema.returns) and all(r.alias_info for r in schema.returns)
    shared |= schema.name == "aten::_unsafe_view"
    written = schema.is_mutable or is_composite(func)
    return shared and not written and func.namespace == "aten"


@cache
def base_name(func: Any) -> str:
    """Return an operation's name without the in-place underscore.

    Outside torch's namespace the name is full: `audit::cumsum` is not
    `cumsum`.
    """
    name = func.overloadpacket.__name__
    own = func.namespace in TORCHS_OWN
    if func.namespace == "prims":  # an author may add an operation to prims
        own = name in getattr(sys.modules.get("torch._prims"), "__all__", ())
    if name.endswith("_") and name[-2:] != "__":
        name = name[:-1]
    return name if own else f"{func.namespace}::{name}"


# Operations that return uninitialised memory.
UNSET = (
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
)
