"""A value that a model computes, and the few numbers kept of it: a digest."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..running.places import Place, Stack
from ..running.tolerances import MARKS_SHARE

HEAD = re.compile(r"(, )?head \d+$")  # ends the name of a step of one head
MARKS = 33  # order statistics that are kept of a value
MASKED = -1e30  # scores below are masked
SHARE_IN_LAYERS = 0.6  # of a model's values are in its layers
FEWEST_DIFFERENT_NUMBERS = 4  # of a value that is not taken for another
NAMES = "mean, deviation, least, most and norm"


@dataclass(frozen=True)
class Digest:
    """A value as it is kept after the first run.

    Where two values differ by at most d everywhere, in any order, their
    marks do as well.
    """

    finite: int  # how many numbers are finite
    other: int  # how many are not
    marks: np.ndarray  # order statistics of the finite ones, evenly spaced
    size: float  # their root mean square
    trivial: bool  # whether the value is too plain to be recognised by

    def is_copy(self, of: "Digest") -> bool:
        """Whether both have the same numbers, in any order."""
        alike = math.isclose(self.size, of.size, rel_tol=1e-12)
        return alike and self.distance(of) == 0

    def distance(self, other: "Digest") -> float:
        """Return the largest difference of marks, inf for other sizes."""
        if (self.finite, self.other) != (other.finite, other.other):
            return math.inf
        return float(np.abs(self.marks - other.marks).max(initial=0.0))

    def scale_of(self, other: "Digest") -> float | None:
        """Return c where the other value may be c times this one."""
        alike = (self.finite, self.other) == (other.finite, other.other)
        if self.trivial or other.trivial or not alike:
            return None
        ours, theirs = self.marks / self.size, other.marks / other.size
        for sign, marks in ((1.0, theirs), (-1.0, -theirs[::-1])):
            if np.abs(ours - marks).max() < MARKS_SHARE:
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
    digest: Digest  # what is kept of it
    stack: Stack  # the way to it from the model's call
    inputs: tuple[int, ...] = ()  # numbers of what it is computed from
    view: bool = False  # whether it is only a part of its input
    # whether it is also a step inside its own operation: a norm without
    # weights is its normalised input
    own_step: bool = False
    # the lines that laid its inputs out again: views, transposes, copies
    moves: tuple[Place, ...] = ()
    constant: bool = False  # whether no token leads to it

    @property
    def call(self) -> object:
        """The facts that the values of one call of a function share."""
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
    if not value.numel() or value.min() >= MASKED:
        return value
    return torch.where(value < MASKED, -torch.inf, value)


def digest(value: Tensor) -> Digest:
    """Return the digest of a value of any shape and floating dtype."""
    flat = plain(value).flatten()
    finite = flat if bool(flat.sum().isfinite()) else flat[flat.isfinite()]
    count = finite.numel()
    if count == 0:
        return Digest(0, flat.numel(), np.zeros(0), 0.0, trivial=True)
    ranks = np.linspace(0, count - 1, MARKS).round().astype(int)
    # numpy is ten times as fast as torch; a copy in its own dtype is exact
    exact = value.dtype if value.dtype == torch.float32 else torch.float64
    marks = np.partition(finite.to(exact).numpy(), ranks)[ranks].astype(float)
    size = float(torch.linalg.vector_norm(finite)) / count**0.5
    trivial = len(np.unique(marks)) < FEWEST_DIFFERENT_NUMBERS
    return Digest(count, flat.numel() - count, marks, size, trivial)


def number_layers(values: Sequence[Value]) -> Sequence[Value]:
    """Number the layers of what is computed in a loop over them.

    A line that is reached once a layer, or several times in each, belongs
    to them in turn. Where modules say which layer runs, it must stand
    after each, or before each. Where none do, most of a model is in its
    layers: what else is repeated are its heads, or queries, keys and values.
    """
    groups: dict[object, list[int]] = {}
    ran: list[int] = []  # the layer that was the last to run, at each value
    for value in values:
        place = value.place
        if place.layer is None:
            key = value.stack, place.op, place.inside
            groups.setdefault(key, []).append(value.number)
            ran.append(ran[-1] if ran else -1)
        else:
            ran.append(place.layer)
    repeated = [group for group in groups.values() if len(group) > 1]
    said = max(ran) + 1
    layers = said or min(map(len, repeated), default=0)
    repeated = [g for g in repeated if layers > 1 and len(g) % layers == 0]
    if not said and sum(map(len, repeated)) <= SHARE_IN_LAYERS * len(values):
        return values
    found = list(values)
    for group in repeated:
        times = len(group) // layers
        after = {ran[n] - i // times for i, n in enumerate(group)}
        if said and after not in ({0}, {-1}):
            continue
        for i, number in enumerate(group):
            value = found[number]
            place = replace(value.place, layer=i // times)
            found[number] = replace(value, place=place)
    return found


def statistics(value: Float[Tensor, "..."]) -> Float[Tensor, "5"]:
    """Return mean, deviation, least, most and norm of the finite numbers.

    In float64; the deviation is that of all numbers, not of a sample.
    """
    numbers = plain(value).flatten()
    numbers = numbers[numbers.isfinite()]
    if not numbers.numel():
        return torch.zeros(5, dtype=torch.float64)
    deviation, mean = torch.std_mean(numbers, correction=0)
    ends = *numbers.aminmax(), torch.linalg.vector_norm(numbers)
    return torch.stack([mean, deviation, *ends])


def of_one_size(found: Float[Tensor, "5"]) -> Float[Tensor, "5"]:
    """Return statistics with the logarithm of the norm.

    Of how many times the root mean square it is, in units of that: it is of
    the size of the others, and one bound of rounding fits all.
    """
    *others, norm = found.double()
    size = torch.hypot(*others[:2])
    times = (norm / size).log().nan_to_num(0.0, 0.0, 0.0)
    return torch.stack([*others, size * times])


def reduced(value: Float[Tensor, "..."]) -> Float[Tensor, "5"]:
    """Return what is compared of a value next to statistics."""
    return of_one_size(statistics(value))
