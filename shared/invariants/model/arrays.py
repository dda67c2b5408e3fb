"""Functions written in arrays: of NumPy, JAX, MLX or Keras."""

import functools
import inspect
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

IN_ARRAYS = "written in arrays: gradients cannot pass"


def is_array(value: Any) -> bool:
    """Whether a value is an array, and no tensor of torch's."""
    return not isinstance(value, Tensor | type) and (
        hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    )


def as_tensor(array: Any) -> Tensor | None:
    """Return a copy of an array on the CPU; None: it holds no numbers."""
    try:
        if hasattr(array, "__array__"):
            copy = np.array(array)
            if copy.dtype.kind in "biufc":
                # torch has neither foreign byte orders nor long doubles
                wide = copy.dtype.itemsize > 8 and copy.dtype.kind == "f"
                native = copy.dtype.newbyteorder("=")
                copy = copy.astype(np.float64 if wide else native)
                return torch.from_numpy(copy)
        # NumPy has no bfloat16
        return torch.from_dlpack(array).cpu().clone()
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None


def as_array(value: Any) -> Any:
    """Return a tensor as an array of NumPy; all else is as it was."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return value


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function or a callable object, if it is Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(inspect.unwrap(function), "__code__", None)
