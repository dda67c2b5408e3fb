"""Measure a difference, and decide whether it is more than rounding.

The tolerance of check_causality and of all checks that compare scores:

- A difference of up to FLOOR_UNITS units of rounding of the largest score is
  ignored.
- To judge a larger difference, every weight is nudged: changed at random by up
  to NUDGE_UNITS units of rounding. A difference that stays the same is real,
  because a leak does not depend on the last bits of the weights. Any other
  difference is rounding.
- The unit is that of the coarsest precision in the model, because a nudge in
  float64 would be lost in a float32 softmax.
- So each model is measured by its own noise. A difference of 1e-9 in a clean
  float64 model still counts.
- The cosine of an angle of 4,000 rounds 4,000 times as coarsely as that of an
  angle near 1. No nudge shows that, so the noise is multiplied by the angle.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..validation import dtype_name
from .errors import NotFinite
from .model.building import Model
from .operations import UNSET, is_plain, operations_through
from .places import Place, find_place
from .ranks import local
from .tolerances import (
    FLOOR_UNITS,
    FLOOR_UNITS_OF_16_BITS,
    FLOOR_UNITS_WITHOUT_WEIGHTS,
    FLOOR_UNITS_WITHOUT_WEIGHTS_OF_16_BITS,
    NUDGE_UNITS,
    NUDGE_UNITS_OF_16_BITS,
    PRINTED_UNITS,
    STEADY_SHARE,
)

SCORES_AT_ONCE = 1 << 22  # most scores to subtract at once, to save memory
ROWS_AT_ONCE = 4096  # most rows of a matrix to nudge at once, to save memory

# Operations that make or rearrange a mask. Its 0, 1 and infinity are exact in
# any dtype.
OF_MASKS = {"ones", "zeros", "full", "ones_like", "zeros_like", "full_like"}
OF_MASKS |= {"tril", "triu", "view", "expand", "slice", "unsqueeze", "t"}

TURNS = ("sin", "cos")  # operations whose argument is an angle


def gaps(
    a: Float[Tensor, "*batch vocab"], b: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Return each position's largest difference; NaN counts as infinity.

    Two equal infinities do not differ.
    """
    if a.ndim > 1 and a.numel() > 2 * SCORES_AT_ONCE:  # save memory
        size = max(1, SCORES_AT_ONCE * a.size(-2) // a.numel())
        pairs = zip(a.split(size, -2), b.split(size, -2), strict=True)
        return torch.cat([gaps(*pair) for pair in pairs], -1)
    if a.dtype != torch.float64:
        a, b = a.float(), b.float()
    gap = (a - b).abs_().amax(-1)
    odd = ~torch.isfinite(gap)
    if odd.any():
        exact = minus(a[odd], b[odd]).abs_()
        gap[odd] = exact.nan_to_num_(nan=math.inf).amax(-1)
    return gap


def minus(
    a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return a - b, where the difference of two equal infinities is 0."""
    return torch.where(a == b, 0.0, a - b)


def require_finite(
    scores: Float[Tensor, "..."], infinite: bool = False
) -> None:
    """Raise NotFinite for NaN and, unless `infinite`, for infinite scores.

    Nothing can be compared with NaN.
    """
    odd = scores.isnan() if infinite else ~scores.isfinite()
    if bool(odd.any()):
        share = f"{float(odd.double().mean()):.2%} of the scores"
        words = "NaN" if infinite else "NaN or infinite"
        raise NotFinite(f"{share} that are compared are {words}")


def floor_of(dtype: torch.dtype) -> int:
    """Return how many units of rounding are ignored in scores of a dtype."""
    wide = torch.finfo(dtype).bits > 16
    return FLOOR_UNITS if wide else FLOOR_UNITS_OF_16_BITS


def rounding(scores: Float[Tensor, "..."]) -> float:
    """Return one unit of rounding at the size of the largest score."""
    largest = scores.detach().abs().nan_to_num_(posinf=0.0).max()
    return torch.finfo(scores.dtype).eps * float(largest)


def floor(scores: Float[Tensor, "..."]) -> float:
    """Return the size up to which differences of scores are ignored."""
    return floor_of(scores.dtype) * rounding(scores)


def differ(
    scores: Float[Tensor, "*batch vocab"],
    others: Float[Tensor, "*batch vocab"],
) -> bool:
    """Return whether scores differ by more than the ignored rounding."""
    return float(gaps(scores, others).max()) > floor(others)


def is_real(
    model: Model,
    difference: Callable[[], Float[Tensor, "..."]],
    noise: float,
) -> bool:
    """Return whether a difference is more than rounding.

    A real difference stays the same while weights are nudged. `noise` is the
    rounding of the scores that are subtracted.
    """
    with operations_through(Inside()) as inside:
        first = difference()
    size = float(first.abs().max())
    if not math.isfinite(size):
        return True
    noise *= inside.angle
    if size <= floor_of(first.dtype) * noise:
        return False
    found = model.parameters() if isinstance(model, nn.Module) else ()
    plain = (p for p in found if is_plain(type(local(p))))
    weights = [p for p in plain if _rounds(p)]
    inside.dtypes |= {weight.dtype.to_real() for weight in weights}
    coarsest, unit = inside.coarsest, inside.unit
    if not weights:
        noise *= max(1.0, unit / torch.finfo(first.dtype).eps)
        others = FLOOR_UNITS_WITHOUT_WEIGHTS_OF_16_BITS
        units = FLOOR_UNITS_WITHOUT_WEIGHTS.get(coarsest, others)
        printed = PRINTED_UNITS * getattr(model, "step", 0.0)
        return size > max(units * noise, printed)
    wide = torch.finfo(coarsest).bits > 16
    units = NUDGE_UNITS if wide else NUDGE_UNITS_OF_16_BITS
    for seed in (1, 2, 3):
        with put_back_after(weights):
            nudge(weights, units * unit, seed)
            change = float((difference() - first).abs().max())
        if not change <= STEADY_SHARE * size:
            return False
    return True


@dataclass(frozen=True)
class Gap:
    """The place and size of the largest difference, and the rounding."""

    at: list[int]
    size: float
    noise: float
    dtype: str  # dtype of the scores


def real_gap(
    model: Model,
    one: Callable[[], Float[Tensor, "*batch vocab"]],
    other: Callable[[], Float[Tensor, "*batch vocab"]],
    known: tuple[Tensor, Tensor] | None = None,
    shown: Bool[Tensor, "*batch"] | None = None,
) -> Gap | None:
    """Return the largest difference of two computations, or None.

    None means that all differences are rounding. `known` has both results, if
    they exist already. `shown` selects the positions to compare.
    """
    scores, others = known or (one(), other())
    moved = gaps(others, scores)
    if shown is not None:
        moved = moved.where(shown, 0.0)
    at = np.unravel_index(int(moved.argmax()), moved.shape)
    size, noise = float(moved[at]), rounding(scores)
    if math.isinf(size):
        require_finite(scores[at], infinite=True)
    if size > floor(scores) and is_real(
        model, lambda: minus(other()[at], one()[at]), noise
    ):
        return Gap([int(i) for i in at], size, noise, dtype_name(scores.dtype))
    return None


class Inside:
    """Records the operations that compute floats, with their dtypes."""

    def __init__(self) -> None:
        self.operations: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self.angle = 1.0  # largest angle of a sine or cosine

    @property
    def coarsest(self) -> torch.dtype:
        """Return the dtype with the coarsest rounding."""
        return max(self.dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def unit(self) -> float:
        """Return the largest rounding of a number near 1."""
        return torch.finfo(self.coarsest).eps

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and record its name and dtypes."""
        answer = func(*args, **kwargs)
        parts = answer if isinstance(answer, list | tuple) else [answer]
        for part in parts if name not in OF_MASKS else ():
            if isinstance(part, Tensor) and _rounds(part):
                self.dtypes.add(part.dtype.to_real())
        if name in TURNS and args[0].numel():
            self.angle = max(self.angle, float(args[0].abs().max()))
        if any(isinstance(x, Tensor) and _rounds(x) for x in args):
            self.operations.add(name)
        return answer


class FirstNaN:
    """Records the line of the first operation whose result has NaN."""

    def __init__(self) -> None:
        self.place: Place | None = None

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and search its results for NaN."""
        answer = func(*args, **kwargs)
        parts = answer if isinstance(answer, list | tuple) else [answer]
        if self.place is None and name not in UNSET and any(map(_odd, parts)):
            self.place = find_place(name)
        return answer


def _odd(part: Any) -> bool:
    """Return whether a value is a tensor of floats with NaN."""
    floats = isinstance(part, Tensor) and part.is_floating_point()
    return floats and bool(part.isnan().any())


@torch.no_grad()
def nudge(tensors: Iterable[Tensor], size: float, seed: int) -> None:
    """Change each entry in place by a random share of it, at most `size`."""
    for tensor in map(local, tensors):
        generator = torch.Generator().manual_seed(seed)
        for part in tensor.split(ROWS_AT_ONCE) if tensor.ndim else (tensor,):
            noise = torch.rand(part.shape, generator=generator)
            noise = noise.to(part).mul_(2).sub_(1)
            part.addcmul_(part, noise, value=size)


@contextmanager
def put_back_after(weights: Collection[Tensor]) -> Iterator[list[Tensor]]:
    """Restore weights that the body changes; yield the original values.

    A float64 weight is saved in float32 if that is exact, as after a
    conversion from float32. This takes half the memory.
    """
    saved = [_saved(local(weight).detach()) for weight in weights]
    try:
        yield saved
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, saved, strict=True):
                local(weight).copy_(value)


def _saved(weight: Tensor) -> Tensor:
    """Return a copy of a weight, in float32 if that is exact."""
    if weight.dtype == torch.float64:
        short = weight.float()
        if short.double().equal(weight):
            return short
    return weight.clone()


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
