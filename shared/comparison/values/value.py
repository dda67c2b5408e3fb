"""A value that a model computes, and the few numbers kept of it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .places import Place, Stack

MARKS = 33  # order statistics that are kept of a value
MASKED = -1e30  # scores below are masked, whatever stands for -inf
FEWEST = 4  # different numbers that a value must have to be told from others


@dataclass(frozen=True)
class Digest:
    """What is kept of a value after the first run.

    Where two values differ by at most d everywhere, in any order, their
    marks do, too.
    """

    finite: int  # how many numbers are finite
    other: int  # how many are not
    marks: np.ndarray  # order statistics of the finite ones, evenly spaced
    size: float  # their root mean square
    trivial: bool  # whether the value is too plain to be recognised by

    def is_copy(self, of: "Digest") -> bool:
        """Whether the same numbers are there, in any order."""
        alike = math.isclose(self.size, of.size, rel_tol=1e-12)
        return alike and self.distance(of) == 0

    def distance(self, other: "Digest") -> float:
        """Return the largest difference of marks, inf for other sizes."""
        if (self.finite, self.other) != (other.finite, other.other):
            return math.inf
        return float(np.abs(self.marks - other.marks).max(initial=0.0))

    def scale_of(self, other: "Digest") -> float | None:
        """Return c where the other value may be c times this one."""
        if self.trivial or other.trivial:
            return None
        if (self.finite, self.other) != (other.finite, other.other):
            return None
        ours, theirs = self.marks / self.size, other.marks / other.size
        for sign, marks in ((1.0, theirs), (-1.0, -theirs[::-1])):
            if np.abs(ours - marks).max() < 1e-6:
                return sign * other.size / self.size
        return None


@dataclass(frozen=True)
class Value:
    """One value that a run computed."""

    number: int  # its place in the order of the run
    event: int  # the same, copies and views counted: names it in a second run
    place: Place  # where it is computed
    shape: tuple[int, ...]  # of the tensor
    dtype: torch.dtype  # of the tensor
    inputs: tuple[int, ...]  # numbers of the values that it is computed from
    view: bool  # whether it is only a part of its input, seen on its own
    # whether it is also a step inside its own operation: a norm without
    # weights is its normalised input
    own_step: bool
    stack: Stack  # the way to it from the model's call
    digest: Digest  # what is kept of it

    @property
    def call(self) -> object:
        """What the values of one call of one function have in common."""
        place = self.place
        return place.path, place.function, place.layer, self.stack[1:]


def real(value: Tensor) -> Tensor:
    """Return a value with an axis of two for the parts of complex numbers."""
    return torch.view_as_real(value) if value.is_complex() else value


def plain(value: Tensor) -> Tensor:
    """Return a value in float64 on the CPU, masked scores all alike.

    A mask of the lowest finite number and one of -inf are one mask. Complex
    numbers, as rotary positions have them, are two real ones each.
    """
    value = real(value.detach()).to("cpu", torch.float64)
    return torch.where(value < MASKED, -torch.inf, value)


def digest(value: Tensor) -> Digest:
    """Return the digest of a value of any shape and floating dtype."""
    flat = plain(value).flatten()
    finite = flat[flat.isfinite()]
    count = finite.numel()
    if count == 0:
        return Digest(0, flat.numel(), np.zeros(0), 0.0, trivial=True)
    ranks = torch.linspace(0, count - 1, MARKS, dtype=torch.float64)
    marks = finite.sort().values[ranks.round().long()].numpy()
    size = float(torch.linalg.vector_norm(finite)) / count**0.5
    trivial = len(np.unique(marks)) < FEWEST
    return Digest(count, flat.numel() - count, marks, size, trivial)


def layers_by_repetition(values: Sequence[Value]) -> Sequence[Value]:
    """Number the layers of a model that has no modules for them.

    A call that is reached the same way once more belongs to the next layer;
    what a layer reaches several times counts as often in every layer. Most
    of a model is in its layers: what else is repeated are its heads, or
    queries, keys and values.
    """
    keys = [(v.stack, v.place.op, v.place.inside) for v in values]
    counts = Counter(keys)
    layers = min((c for c in counts.values() if c > 1), default=0)
    if not layers or any(v.place.layer is not None for v in values):
        return values
    repeated = sum(c for c in counts.values() if c > 1 and c % layers == 0)
    if repeated <= len(values) / 2:
        return values
    seen = Counter[object]()
    found = []
    for key, value in zip(keys, values, strict=True):
        if counts[key] > 1 and counts[key] % layers == 0:
            layer = seen[key] // (counts[key] // layers)
            seen[key] += 1
            place = replace(value.place, layer=layer)
            value = replace(value, place=place)
        found.append(value)
    return found
