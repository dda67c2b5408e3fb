"""How large a difference is, and whether it is more than rounding.

A leak does not care about the last bits of the weights; rounding does. So a
difference is real if it stays the same when every weight is nudged by a few
units of rounding, and noise if the nudge redraws it. No constant has to fit
all models: deep, sharp or partly single-precision ones bring their own
noise, and a difference of 1e-9 in a clean float64 model still counts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..model.subject import Model, Subject
from .copies import nudge, restore

FLOOR = 64  # units of rounding of the largest score: never looked at
COARSE = 2  # the same for 16 bits, where 64 units are half the scores
NUDGE = 256  # units of rounding by which weights are nudged
ALIKE = 0.2  # what a real difference may change by under the nudge

# For functions, whose weights nobody can nudge: units of rounding.
BLIND = {torch.float64: 2**20, torch.float32: 2**8}

TOKENS_AT_ONCE = 2048
BYTES_AT_ONCE = 1 << 28


def rows_at_once(subject: Subject, time: int) -> int:
    """Return how many sequences fit in one call, within the memory budget."""
    # the scores, those they are compared with, and their difference
    by_scores = BYTES_AT_ONCE // (time * subject.vocab_size * 8)
    return max(1, min(TOKENS_AT_ONCE // time, by_scores))


def gaps(
    a: Float[Tensor, "*batch vocab"], b: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Return the largest difference over the vocabulary; NaN counts as inf.

    Two equal infinities do not differ.
    """
    if a.dtype != torch.float64:
        a, b = a.float(), b.float()
    gap = (a - b).abs_().amax(-1)
    odd = ~torch.isfinite(gap)
    if odd.any():
        exact = (a[odd] - b[odd]).abs_()
        exact[a[odd] == b[odd]] = 0
        gap[odd] = exact.nan_to_num_(nan=math.inf).amax(-1)
    return gap


def epsilon(scores: Float[Tensor, "..."]) -> float:
    """Return the unit of rounding of a tensor's dtype."""
    return torch.finfo(scores.dtype).eps


def floor_of(dtype: torch.dtype) -> int:
    """Return how many units of rounding are never looked at."""
    return FLOOR if torch.finfo(dtype).bits > 16 else COARSE


def rounding(scores: Float[Tensor, "..."]) -> float:
    """Return the rounding of the largest score."""
    largest = scores.detach().abs().nan_to_num(posinf=0.0, neginf=0.0).max()
    return epsilon(scores) * float(largest)


def spread(scores: Float[Tensor, "*batch vocab"]) -> float:
    """Return the median over positions of the scores' standard deviation."""
    finite = scores.detach().double().nan_to_num(0.0, posinf=0.0, neginf=0.0)
    return float(finite.std(-1).median())


@contextmanager
def nudged(model: Model, size: float, seed: int) -> Iterator[None]:
    """Nudge the weights inside, put them back after."""
    saved = nudge(model, size, seed)
    try:
        yield
    finally:
        restore(model, saved)


def is_real(
    model: Model,
    difference: Callable[[], Float[Tensor, "..."]],
    noise: float,
) -> bool:
    """Whether a difference is more than rounding.

    Args:
        model: whose weights are nudged while the difference is measured.
        difference: measures it anew.
        noise: rounding of the numbers whose difference it is.
    """
    first = difference()
    size = float(first.abs().max())
    if not math.isfinite(size):
        return True
    if size <= floor_of(first.dtype) * noise:
        return False
    parameters = (
        [p for p in model.parameters() if p.is_floating_point()]
        if isinstance(model, nn.Module)
        else []
    )
    if not parameters:
        return size > BLIND.get(first.dtype, 16) * noise
    dtype = parameters[0].dtype
    units = NUDGE if torch.finfo(dtype).bits > 16 else COARSE
    for seed in (1, 2):
        with nudged(model, units * torch.finfo(dtype).eps, seed):
            change = float((difference() - first).abs().max())
        if not change <= ALIKE * size:
            return False
    return True
