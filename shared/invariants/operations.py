"""A mode that sees each operation that PyTorch runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .model.subclasses import is_plain

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
