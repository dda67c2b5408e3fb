"""How large a difference is, and whether it is more than rounding.

The tolerance of check_causality and of all checks that compare scores:

- a difference of up to FLOOR_UNITS units of rounding of the largest score is
  ignored;
- a larger one is real if it stays the same while every weight is changed at
  random by up to NUDGE_UNITS units of rounding, and rounding if it does not
  stay: a leak does not depend on the last bits of the weights, rounding does;
- a unit is that of the coarsest precision that computes inside, or a float32
  softmax in a float64 model would not feel the nudge;
- so no constant has to fit all models: deep, sharp or partly
  single-precision ones bring their own noise, and a difference of 1e-9 in a
  clean float64 model still counts;
- an angle of 4,000, whose cosine is taken, rounds 4,000 times as coarsely as
  a number near 1, and no nudge of a weight feels it.
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

SCORES_AT_ONCE = 1 << 22  # whose differences are taken
ROWS_AT_ONCE = 4096  # of a matrix that is nudged

# Operations that make a mask of 0, 1 or infinity, or lay it out: in whatever
# dtype, they do not round.
OF_MASKS = {"ones", "zeros", "full", "ones_like", "zeros_like", "full_like"}
OF_MASKS |= {"tril", "triu", "view", "expand", "slice", "unsqueeze", "t"}

TURNS = ("sin", "cos")  # of an angle


def gaps(
    a: Float[Tensor, "*batch vocab"], b: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Return the largest difference over the vocabulary; NaN counts as inf.

    Two equal infinities do not differ.
    """
    if a.ndim > 1 and a.numel() > 2 * SCORES_AT_ONCE:  # no third table
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
    """Return a - b, where two equal infinities do not differ."""
    return torch.where(a == b, 0.0, a - b)


def require_finite(
    scores: Float[Tensor, "..."], infinite: bool = False
) -> None:
    """Raise NotFinite if scores are NaN, or infinite where that is not taken.

    Nothing can be compared with NaN.
    """
    odd = scores.isnan() if infinite else ~scores.isfinite()
    if bool(odd.any()):
        share = f"{float(odd.double().mean()):.2%} of the scores"
        words = "NaN" if infinite else "NaN or infinite"
        raise NotFinite(f"{share} that are compared are {words}")


def floor_of(dtype: torch.dtype) -> int:
    """Return how many units of rounding are ignored."""
    wide = torch.finfo(dtype).bits > 16
    return FLOOR_UNITS if wide else FLOOR_UNITS_OF_16_BITS


def rounding(scores: Float[Tensor, "..."]) -> float:
    """Return the rounding of the largest score."""
    largest = scores.detach().abs().nan_to_num_(posinf=0.0).max()
    return torch.finfo(scores.dtype).eps * float(largest)


def floor(scores: Float[Tensor, "..."]) -> float:
    """Return the size up to which differences of scores are ignored."""
    return floor_of(scores.dtype) * rounding(scores)


def differ(
    scores: Float[Tensor, "*batch vocab"],
    others: Float[Tensor, "*batch vocab"],
) -> bool:
    """Whether scores differ from others by more than is ignored of those."""
    return float(gaps(scores, others).max()) > floor(others)


def is_real(
    model: Model,
    difference: Callable[[], Float[Tensor, "..."]],
    noise: float,
) -> bool:
    """Whether a difference is more than rounding.

    It is measured again while weights are nudged; noise is the rounding of
    the numbers whose difference it is.
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
    """Where two tables of scores differ most, by how much, and rounding."""

    at: list[int]
    size: float
    noise: float
    dtype: str  # of the scores


def real_gap(
    model: Model,
    one: Callable[[], Float[Tensor, "*batch vocab"]],
    other: Callable[[], Float[Tensor, "*batch vocab"]],
    known: tuple[Tensor, Tensor] | None = None,
    shown: Bool[Tensor, "*batch"] | None = None,
) -> Gap | None:
    """Return where scores of two ways to compute them really differ, or None.

    Known holds the scores of both; shown masks the positions to compare.
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
    """Notes the operations that compute floats inside, and their dtypes."""

    def __init__(self) -> None:
        self.operations: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self.angle = 1.0  # the largest: its rounding is that of its cosine

    @property
    def coarsest(self) -> torch.dtype:
        """The dtype with the largest rounding."""
        return max(self.dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def unit(self) -> float:
        """The largest rounding of a number near 1."""
        return torch.finfo(self.coarsest).eps

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and note its name and dtypes."""
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
    """Notes the line of the first operation that makes a NaN of numbers."""

    def __init__(self) -> None:
        self.place: Place | None = None

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and look for NaN in what it returns."""
        answer = func(*args, **kwargs)
        parts = answer if isinstance(answer, list | tuple) else [answer]
        if self.place is None and name not in UNSET and any(map(_odd, parts)):
            self.place = find_place(name)
        return answer


def _odd(part: Any) -> bool:
    """Whether a tensor has NaN."""
    floats = isinstance(part, Tensor) and part.is_floating_point()
    return floats and bool(part.isnan().any())


@torch.no_grad()
def nudge(tensors: Iterable[Tensor], size: float, seed: int) -> None:
    """Change each number in place by a random share of it, at most a size."""
    for tensor in map(local, tensors):
        generator = torch.Generator().manual_seed(seed)
        for part in tensor.split(ROWS_AT_ONCE) if tensor.ndim else (tensor,):
            noise = torch.rand(part.shape, generator=generator)
            noise = noise.to(part).mul_(2).sub_(1)
            part.addcmul_(part, noise, value=size)


@contextmanager
def put_back_after(weights: Collection[Tensor]) -> Iterator[None]:
    """Give weights that are changed inside their values back."""
    saved = [local(weight).detach().clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, saved, strict=True):
                local(weight).copy_(value)


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
