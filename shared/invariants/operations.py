"""A mode that sees each operation that PyTorch runs.

Tensors of a class of their own (quantised, or laid out by a library) copy and
compute by that class; the kit changes none of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .ranks import local

FAKE = torch._C._TorchDispatchModeKey.FAKE


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
    packed weights are no tensors.
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
