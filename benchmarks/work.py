"""Count the work of a pass: operations, and bytes moved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gpt_duet.config import GPTConfig

aten = torch.ops.aten
# operations that read only those entries of a table that they return
LOOKUPS = (
    *(aten.embedding.default, aten.index_select.default),
    *(aten.index.Tensor, aten.gather.default),
)


def count_work(
    run: Callable[[], object], model: object
) -> tuple[int, int | None]:
    """Count the operations of a run, and the bytes of weights that it reads.

    Operations are those of matrix products: for both styles,
    2 B T (12 L D^2 + V D) + 4 L B T^2 D. Not every device counts the fused
    kernels of attention and of torch's encoder layer, so they are switched
    off for this run. The bytes are None if the model is not a module.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
            WeightReads(model) as reads,
        ):
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops(), reads.total


class WeightReads(TorchDispatchMode):
    """Counts the bytes of a module's weights that operations read.

    Weights are parameters and buffers. A weight counts once, even if it is
    read again. Of an embedding table, only rows that are read are counted.
    """

    def __init__(self, model: object):
        super().__init__()
        self._sizes: dict[int, int] = {}
        if isinstance(model, nn.Module):
            for tensor in (*model.parameters(), *model.buffers()):
                storage = tensor.untyped_storage()
                self._sizes[storage.data_ptr()] = storage.nbytes()
        self._read: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count the weights among its arguments."""
        found = func(*args, **(kwargs or {}))
        for tensor in () if func.is_view else tree_leaves((args, kwargs)):
            if not isinstance(tensor, Tensor):
                continue
            key = tensor.untyped_storage().data_ptr()
            if key in self._sizes:
                taken = found if func in LOOKUPS else tensor
                read = self._read.get(key, 0) + taken.nbytes
                self._read[key] = min(read, self._sizes[key])
        return found

    @property
    def total(self) -> int | None:
        """Return the bytes that were read; None if there are no weights."""
        return sum(self._read.values()) if self._sizes else None


def cache_bytes(config: GPTConfig, batch: int, past: int, size: int) -> int:
    """Return the bytes of the keys and values of `past` tokens in each row.

    Each entry of a key or value takes `size` bytes.
    """
    return size * 2 * config.n_layer * batch * past * config.n_embd
