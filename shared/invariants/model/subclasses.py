"""Weights that are no plain tensors: quantised, or laid out by a library.

Their own class copies and computes with them; the kit changes none of them.
"""

from typing import Any

from torch import Tensor, nn

from ..ranks import local

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
