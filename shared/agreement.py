"""Bound how far the scores of two styles may differ by rounding."""

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import GPTConfig
from .protocol import Style
from .running.tolerances import STYLE_NATS, STYLE_NATS_IN_FLOAT64


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return max |a - b|, computed in float64; NaN if either has NaN."""
    left, right = (x.detach().cpu().double() for x in (a, b))
    return (left - right).abs().max().item()


def enlarged_random_weights(
    style: Style, config: GPTConfig, seed: int
) -> dict[str, Tensor]:
    """Draw a style's fresh weights, changed so that each affects the scores.

    A fresh model hides mistakes. Its biases are zero and its norms' gains are
    one, so a missing bias or gain does not show. Its matrices are so small
    that every nonlinearity is nearly linear. Therefore vectors get noise, and
    matrices are scaled by four.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = style.to_gpt2(style.build_model(config))
        # drop the head's own matrix, which a style without tying returns
        if config.tie_weights:
            state.pop("lm_head.weight", None)
            state.pop("lm_head.bias", None)
        for tensor in state.values():
            if tensor.dim() == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            else:
                tensor *= 4
    return state


def rounding_bound(
    model: Any,
    tokens: Int[Tensor, "batch time"],
    log_probs: Float[Tensor, "batch time vocab"],
) -> float:
    """Return the largest difference of log_probs that rounding can cause.

    In float64 the bound is a constant. In coarser dtypes, the bound is a
    constant plus twice the error of this model's log_probs, because the other
    model has an error too. The error is the distance from a float64 copy. This
    copy runs on the CPU, because some devices have no float64.
    """
    if log_probs.dtype == torch.float64:
        return STYLE_NATS_IN_FLOAT64
    exact = copy.deepcopy(model).eval().to("cpu", torch.float64)
    with torch.inference_mode():
        error = largest_difference(log_probs, exact.log_probs(tokens.cpu()))
    return 2 * error + STYLE_NATS
