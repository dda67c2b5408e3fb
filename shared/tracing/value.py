"""Describe a value that a model computes, and reduce it to a few numbers."""

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

HEAD = re.compile(r"(, )?head \d+$")  # ends the name of a step for one head
MARKS = 33  # most order statistics (marks) of a value that are kept
MASKED = -1e30  # scores below this count as masked
SHARE_IN_LAYERS = 0.6  # least share of values in layers that no module shows
FEWEST_DIFFERENT_NUMBERS = 4  # with fewer, a value cannot be recognised
NAMES = "mean, deviation, least, most and norm"


@dataclass(frozen=True)
class Digest:
    """A few numbers that describe a value, kept after the first run.

    If the entries of two values differ by at most d, in any order, so do their
    marks.
    """

    finite: int  # how many numbers of the value are finite
    other: int  # how many numbers are not finite
    marks: np.ndarray  # evenly spaced order statistics of the finite numbers
    size: float  # the root mean square of the finite numbers
    trivial: bool  # whether the value is too plain to be recognised

    def is_copy(self, of: "Digest") -> bool:
        """Return whether both values have the same numbers, in any order."""
        alike = math.isclose(self.size, of.size, rel_tol=1e-12)
        return alike and self.distance(of) == 0

    def distance(self, other: "Digest") -> float:
        """Return the largest difference of marks, inf if sizes differ."""
        if (self.finite, self.other) != (other.finite, other.other):
            return math.inf
        return float(np.abs(self.marks - other.marks).max(initial=0.0))

    def scale_of(self, other: "Digest") -> float | None:
        """Return c if the other value may be c times this one, or None."""
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

    number: int  # the value's position in the order of the run
    event: int  # like number, but copies and views count as well
    place: Place  # the line that computes the value
    shape: tuple[int, ...]  # shape of the tensor
    dtype: torch.dtype  # dtype of the tensor
    digest: Digest  # the numbers that are kept of the value
    stack: Stack  # the calls from the model's call down to the value
    inputs: tuple[int, ...] = ()  # value numbers of the inputs
    view: bool = False  # whether the value is only a part of an input
    # whether the value is also a step inside its operation, as a norm without
    # weights returns the normalised input
    own_step: bool = False
    # the lines that rearranged the value's inputs: views, transposes, copies
    moves: tuple[Place, ...] = ()
    constant: bool = False  # whether the value depends on no token

    @property
    def call(self) -> object:
        """Return a key that all values of one call of a function share."""
        place = self.place
        return place.path, place.function, place.layer, self.stack[1:]


def real(value: Tensor) -> Tensor:
    """Return a real value: complex numbers become pairs along a new axis."""
    return torch.view_as_real(value) if value.is_complex() else value


def plain(value: Tensor) -> Tensor:
    """Return a value in float64 on the CPU, with all masked scores equal.

    Masks of -inf and of the lowest finite number become equal. Each complex
    number, as in rotary positions, becomes two real ones.
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
    # numpy sorts ten times as fast as torch; the dtype is exact for the
    # numbers
    exact = value.dtype if value.dtype == torch.float32 else torch.float64
    marks = np.partition(finite.to(exact).numpy(), ranks)[ranks].astype(float)
    size = float(torch.linalg.vector_norm(finite)) / count**0.5
    trivial = len(np.unique(marks)) < FEWEST_DIFFERENT_NUMBERS
    return Digest(count, flat.numel() - count, marks, size, trivial)


def number_layers(values: Sequence[Value]) -> Sequence[Value]:
    """Find the layer of each value that a loop over layers computes.

    Such a loop runs a line equally often in each layer, so the line's values
    belong to the layers in turn. If modules show which layer runs, the line
    must run after each layer, or before each. Otherwise most values must fit,
    because a model also repeats lines for heads, or for queries, keys and
    values.
    """
    groups: dict[object, list[int]] = {}
    ran: list[int] = []  # for each value, the last layer whose module ran
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

    All are in float64; the deviation divides by n.
    """
    numbers = plain(value).flatten()
    numbers = numbers[numbers.isfinite()]
    if not numbers.numel():
        return torch.zeros(5, dtype=torch.float64)
    deviation, mean = torch.std_mean(numbers, correction=0)
    ends = *numbers.aminmax(), torch.linalg.vector_norm(numbers)
    return torch.stack([mean, deviation, *ends])


def of_one_size(found: Float[Tensor, "5"]) -> Float[Tensor, "5"]:
    """Return statistics of similar size, so that one bound fits them all.

    The norm is replaced by rms * log(norm / rms), where rms is the root mean
    square.
    """
    *others, norm = found.double()
    size = torch.hypot(*others[:2])
    times = (norm / size).log().nan_to_num(0.0, 0.0, 0.0)
    return torch.stack([*others, size * times])


def reduced(value: Float[Tensor, "..."]) -> Float[Tensor, "5"]:
    """Return the statistics of a value that are compared."""
    return of_one_size(statistics(value))
