"""How much work a forward pass is, and how fast this machine can work."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shared.config import GPTConfig

SQUARE = 1536  # large enough for any processor's best rate, and quick
BIG_SQUARE = 8192  # for an accelerator, which starts slowly and then is fast
COPIED = 2**27  # bytes: more than most caches hold


def forward_flops(config: GPTConfig, batch: int, time: int) -> int:
    """Return the floating-point operations of a forward pass, all positions.

    2 B T (L (4 D^2 + 2 D F) + V D) + 4 L B T^2 D, with F = 4 D the usual
    2 B T (12 L D^2 + V D) + 4 L B T^2 D. Products of matrices only, a
    multiplication and an addition as two; attention as if every score were
    computed, also the masked ones.

    Args:
        config: L n_layer, D n_embd, F inner_size, V vocab_size.
        batch: B.
        time: T, in tokens.

    Source: Kaplan et al. 2020 (Scaling Laws), table 1, with the head.
    """
    L, D, F = config.n_layer, config.n_embd, config.inner_size
    matrices = L * (4 * D**2 + 2 * D * F) + config.vocab_size * D
    return 2 * batch * time * matrices + 4 * L * batch * time**2 * D


def least_bytes(config: GPTConfig, batch: int, time: int, size: int) -> int:
    """Return the bytes a forward pass must move to and from memory at least.

    Every weight is read once (of the two tables only the rows that are
    looked up, of the head all of it), and the scores of all positions are
    written once. What flows between the layers is taken to stay in caches.

    Args:
        config: the sizes; one weight and bias a norm, one bias a linear map
            inside the blocks, none at the head.
        batch: number of rows.
        time: tokens in a row.
        size: bytes of one number.
    """
    D, F, V = config.n_embd, config.inner_size, config.vocab_size
    norms, biases = 4 * D, 3 * D + D + F + D
    block = 4 * D**2 + 2 * D * F + biases + norms
    read = config.n_layer * block + 2 * D + V * D
    tables = batch * time * D + time * D
    return size * (read + tables + batch * time * V)


def decoding_bytes(
    config: GPTConfig, batch: int, context: int, size: int
) -> int:
    """Return the bytes that decoding one token a row moves at least.

    All weights, and the keys and values of every token before it.

    Args:
        config: as in `least_bytes`.
        batch: number of rows.
        context: number of tokens before this one.
        size: bytes of one number.
    """
    past = 2 * config.n_layer * batch * context * config.n_embd
    return least_bytes(config, batch, 1, size) + size * past


def count_flops(run: Callable[[], object]) -> int:
    """Count the floating-point operations of what runs, product by product.

    The fused kernels of attention and of torch's encoder layer are not
    counted on every device, so that both are taken apart for this run.
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


def square_size(device: torch.device) -> int:
    """Return the size of a square whose product shows a device's best rate.

    1536 on an accelerator would be over in 10 microseconds, which is mostly
    its start.
    """
    return SQUARE if device.type == "cpu" else BIG_SQUARE


def square_product(
    dtype: torch.dtype, device: torch.device, size: int | None = None
) -> Callable[[], Tensor]:
    """Return a product of two square matrices: 2 size^3 operations.

    Args:
        dtype: of the matrices.
        device: where they are.
        size: rows, and columns; None: the device's `square_size`.
    """
    size = square_size(device) if size is None else size
    a, b = (torch.randn(2, size, size, device=device)).to(dtype).unbind(0)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def big_copy(
    device: torch.device, count: int = COPIED
) -> Callable[[], Tensor]:
    """Return a copy of so many bytes: as many are read as are written."""
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def big_read(
    device: torch.device, count: int = COPIED
) -> Callable[[], Tensor]:
    """Return the sum of so many bytes of float32: all of them are read."""
    return torch.ones(count // 4, device=device).sum


def own_products(
    config: GPTConfig,
    batch: int,
    time: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    """Return all the products of matrices of a forward pass, alone.

    The same shapes in the same order with weights of each layer's own, the
    results written where there is room already: what is left of a model
    without norms, sums, softmax and the search for memory.

    All T x T scores are written to memory, and read again. A processor's
    caches hold much of them; on an accelerator, where a fused kernel never
    writes them, a model may well be quicker than these products.
    """
    D, F, T = config.n_embd, config.inner_size, time
    heads, N = batch * config.n_head, batch * time

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    widths = [(D, 3 * D), (D, D), (D, F), (F, D)]
    inputs = {width: draw(N, width) for width in {D, F}}
    outputs = {
        width: inputs[D].new_empty(N, width)
        for width in {D, 3 * D, F, config.vocab_size}
    }
    layers = [
        [draw(width, into) for width, into in widths]
        for _ in range(config.n_layer)
    ]
    head = draw(config.vocab_size, D)  # stored as nn.Linear does
    q, k, v, y = (draw(heads, T, D // config.n_head) for _ in range(4))
    scores = q.new_empty(heads, T, T)

    def run() -> None:
        for layer in layers:
            for weight, (width, into) in zip(layer, widths, strict=True):
                torch.mm(inputs[width], weight, out=outputs[into])
            torch.bmm(q, k.transpose(1, 2), out=scores)
            torch.bmm(scores, v, out=y)
        torch.mm(inputs[D], head.t(), out=outputs[config.vocab_size])

    return run


def parameter_count(model: Any) -> int:
    """Return a model's number of parameters, a tied matrix once."""
    return sum(p.numel() for p in model.parameters())
