"""How much work a pass is: operations, and bytes that are moved."""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gpt_duet.config import GPTConfig


def count_flops(run: Callable[[], object]) -> int:
    """Count the floating-point operations of what runs, product by product.

    For both styles that is 2 B T (12 L D^2 + V D) + 4 L B T^2 D: products
    of matrices, a multiplication and an addition as two operations, and
    attention with its masked scores. The fused kernels of attention and of
    torch's encoder layer are not counted on every device, so that both are
    taken apart for this run.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops()


def least_bytes(
    config: GPTConfig, batch: int, time: int, size: int, past: int = 0
) -> int:
    """Return the bytes a pass must move to and from memory at least.

    Every matrix of the blocks and the head is read once, and the scores of
    all positions are written once. What flows between the layers is taken
    to stay in caches; tables, norms and biases are too small to count.

    Args:
        config: the sizes.
        batch: number of rows.
        time: tokens in a row.
        size: bytes of one number.
        past: tokens before these, whose keys and values are read.
    """
    L, D, V = config.n_layer, config.n_embd, config.vocab_size
    matrices = L * (4 * D**2 + 2 * D * config.inner_size) + V * D
    return size * (matrices + batch * time * V + 2 * L * batch * past * D)
