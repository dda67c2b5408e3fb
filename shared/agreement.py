"""How far the scores of two styles may differ, at weights that show it."""

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import GPTConfig
from .protocol import Style
from .running.tolerances import STYLE_NATS, STYLE_NATS_IN_FLOAT64


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return max |a - b|, computed in float64; NaN where either is NaN."""
    left, right = (x.detach().cpu().double() for x in (a, b))
    return (left - right).abs().max().item()


def enlarged_random_weights(
    style: Style, config: GPTConfig, seed: int
) -> dict[str, Tensor]:
    """Draw a style's fresh weights, and make all of them matter.

    A fresh model hides mistakes. Its biases are zero and its norms' gains
    one, where a forgotten one does not show, and its matrices are so small
    that every nonlinearity is nearly linear. So noise is added to vectors,
    and matrices are made four times as large.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = style.to_gpt2(style.build_model(config))
        if config.tie_weights:  # a style that never ties drew two matrices
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
    """Return the difference in log-probabilities that rounding explains.

    In float64 it is a constant. Below, it is twice the error of the model's
    log_probs against those of its float64 copy, once for each of two models,
    and a constant more. The copy runs on the CPU: each one has float64.
    """
    if log_probs.dtype == torch.float64:
        return STYLE_NATS_IN_FLOAT64
    exact = copy.deepcopy(model).eval().to("cpu", torch.float64)
    with torch.inference_mode():
        error = largest_difference(log_probs, exact.log_probs(tokens.cpu()))
    return 2 * error + STYLE_NATS
