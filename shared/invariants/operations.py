"""A mode that sees each operation that PyTorch runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Base of what sees each operation inside.

    Nothing is compiled there: dynamo, which would take a second, stays out.
    """

    # flex_attention and its like: each runs as one operation
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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
