"""How much work a pass is: operations, and bytes that are moved."""

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
# operations that read as many bytes of a table as they return
LOOKUPS = (
    *(aten.embedding.default, aten.index_select.default),
    *(aten.index.Tensor, aten.gather.default),
)


def count_work(
    run: Callable[[], object], model: object
) -> tuple[int, int | None]:
    """Count the operations of what runs, and the bytes of weights it reads.

    Operations are floating-point ones, product by product: for both styles
    2 B T (12 L D^2 + V D) + 4 L B T^2 D. The fused kernels of attention and
    of torch's encoder layer are not counted on every device, so that both
    are taken apart for this run. The bytes are None for what is not a module.
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

    Weights are parameters and buffers. One that is read again counts once;
    of a table that is looked up only the rows that are taken count.
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
        """Run an operation, and note the weights among its arguments."""
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
        """The bytes that were read; None where there are no weights."""
        return sum(self._read.values()) if self._sizes else None


def cache_bytes(config: GPTConfig, batch: int, past: int, size: int) -> int:
    """Return the bytes of keys and values of `past` tokens in each row.

    A number takes `size` bytes.
    """
    return size * 2 * config.n_layer * batch * past * config.n_embd
