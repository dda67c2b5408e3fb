"""Compute the steps inside torch's fused operations, by formulas.

A fused kernel returns only its result. Here its steps are written out, to be
paired with the lines of a model that takes them one by one.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

# Names of steps that some models take in another way, so a diff never names
# them as the first difference.
RAW_SCORES, MEAN_SQUARE = "query @ key", "mean square"
REPEATED = {"repeated keys": 1, "repeated values": 2}  # the operand's index
OPTIONAL = {RAW_SCORES, MEAN_SQUARE, *REPEATED}
Steps = Iterator[tuple[str, Tensor]]


def attention(
    query: Float[Tensor, "*batch time size"],
    key: Float[Tensor, "*batch key_time size"],
    value: Float[Tensor, "*batch key_time size"],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Steps:
    """Yield the steps of torch's scaled_dot_product_attention.

    The arguments are those of torch's function.
    """
    if enable_gqa:
        times = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(times, -3)
        yield "repeated keys", key
        yield "repeated values", value.repeat_interleave(times, -3)
    products = query @ key.transpose(-2, -1)
    yield RAW_SCORES, products
    if scale is None:
        scale = 1 / math.sqrt(query.size(-1))
    scores = products * scale
    yield "scaled scores", scores
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    yield "masked scores", scores
    yield from softmax(scores, -1)
    yield "probabilities", scores.softmax(-1)


def softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
) -> Steps:
    """Yield the step of torch's softmax, which takes the same arguments."""
    if dim is not None:
        scores = input.to(dtype or input.dtype)
        yield "exponentials", (scores - scores.amax(dim, keepdim=True)).exp()


def gelu(input: Tensor, approximate: str = "none") -> Steps:
    """Yield the steps of torch's gelu, which takes the same arguments."""
    if approximate == "tanh":
        cubic = input + 0.044715 * input**3
        yield "cubic", cubic
        yield "tanh", (math.sqrt(2 / math.pi) * cubic).tanh()


def layer_norm(
    input: Float[Tensor, "*batch features"],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Steps:
    """Yield the steps of torch's layer_norm, from the same arguments."""
    axes = [-1 - axis for axis in range(len(normalized_shape))]
    centred = input - input.mean(axes, keepdim=True)
    yield "centred", centred
    yield from rms_norm(centred, normalized_shape, eps=eps)


def rms_norm(
    input: Float[Tensor, "*batch features"],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Steps:
    """Yield the steps of torch's rms_norm, from the same arguments."""
    axes = [-1 - axis for axis in range(len(normalized_shape))]
    mean = input.square().mean(axes, keepdim=True)
    yield MEAN_SQUARE, mean
    if eps is None:
        eps = torch.finfo(input.dtype).eps
    yield "normalised", input / (mean + eps).sqrt()


FUSED_STEPS: dict[str, Callable[..., Steps]] = {
    "scaled_dot_product_attention": attention,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "softmax": softmax,
    "gelu": gelu,
}
