"""All operations of a run, followed."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..flex import flex_as_written
from .arguments import tensors_in
from .shadows import Shadows

TEXTS = ("tolist", "__repr__", "__str__")
LEAVES = ("numpy", "__array__", "__dlpack__", "data_ptr")


class _Leaving(TorchFunctionMode):
    """Sees tensors that are turned into numbers of Python's or NumPy's."""

    def __init__(self, shadows: Shadows):
        super().__init__()
        self.shadows = shadows

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in TEXTS or name in LEAVES:
            with _disable_current_modes():
                left = name in LEAVES
                self.shadows._read(name, tensors_in(args[:1]), left)
        return func(*args, **(kwargs or {}))


@contextmanager
def followed(shadows: Shadows) -> Iterator[None]:
    """Follow all operations inside."""
    with flex_as_written(), _Leaving(shadows), shadows:
        yield
