"""Emulate a second device, which computes on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from ....running.operations import Operations, functions_through

# The name of the emulated device. Torch's own tensors on "meta" hold no data.
NAME = "meta"
ATEN = torch.ops.aten
# Operations that take tensors of two devices, as on CUDA.
ACROSS = {
    *(ATEN._to_copy, ATEN.copy_),
    *(ATEN.index, ATEN.index_put, ATEN.index_put_),
}


@contextmanager
def elsewhere() -> Iterator[None]:
    """Emulate in the body a device, NAME, whose tensors the CPU computes.

    As with any two devices, a tensor that stays on the CPU cannot be combined
    with one that moved: RuntimeError, "same device". Attention is computed by
    plain operations, because a fused one rejects unknown devices.
    """
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            _Operations(),
            functions_through(_numbers),
            sdpa_kernel(SDPBackend.MATH),
        ):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


class Away(Tensor):
    """A tensor that claims to be on the emulated device."""

    here: Tensor  # the tensor's data, on the CPU

    @staticmethod
    def __new__(cls, here: Tensor) -> "Away":
        """Return a tensor like `here` that claims the emulated device."""
        away: Away = Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(NAME),
        )
        away.here = here
        return away

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function, types, args=(), kwargs=None
    ):
        return _compute(function, args, kwargs or {})


class _Operations(Operations):
    """Runs each operation on the device of its tensors."""

    sees = (Away,)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _compute(function, args, kwargs or {})


def _numbers(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Move data between tensors on the CPU and on the emulated device."""
    if function is Tensor.tolist and isinstance(args[0], Away):
        return args[0].here.tolist()
    if function in (torch.tensor, torch.as_tensor) and (
        str(kwargs.get("device")) == NAME
    ):
        return function(*args, **kwargs | {"device": "cpu"}).to(NAME)
    if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(
        args[0], Away
    ):
        x, index, *value = args
        parts = index if isinstance(index, tuple) else (index,)
        return function(x, tuple(map(_listed, parts)), *value)
    return function(*args, **kwargs)


def _listed(index: Any) -> Any:
    """Return a list of indices as a tensor, and any other index as it is."""
    return torch.tensor(index) if isinstance(index, list | range) else index


def _compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, (args, kwargs))
    left = [t for t in tensors if not isinstance(t, Away)]
    moved = len(left) < len(tensors)
    wanted = kwargs.get("device")
    away = moved if wanted is None else str(wanted) == NAME
    for tensor in left if moved else ():
        if tensor.is_meta:
            raise NotImplementedError("a tensor was made without its numbers")
        kind = getattr(function, "overloadpacket", function)
        if tensor.dim() and kind not in ACROSS:
            raise RuntimeError(
                "expected all tensors to be on the same device, found "
                f"one of shape {(*tensor.shape,)} on the {tensor.device} "
                f"in {kind.__name__}"
            )
    if away and wanted is not None:
        kwargs = kwargs | {"device": "cpu"}
    own_args, own_kwargs = tree_map_only(
        Away, lambda t: t.here, (args, kwargs)
    )
    result = function(*own_args, **own_kwargs)
    if function._schema.is_mutable and args and result is own_args[0]:
        return args[0]
    return tree_map_only(Tensor, Away, result) if away else result
