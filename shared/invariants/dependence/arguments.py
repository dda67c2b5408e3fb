"""What an operation is given, and what it does to it."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

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


def decomposed(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operation as the others that it is made of.

    The kernel in C++ is what a model runs; func.decompose would take a second
    one, in Python, whose import of sympy alone lasts half a second.
    """
    return func._op_dk(COMPOSITE, *args, **kwargs)
