"""Which lengths a model accepts, where it does not accept them all."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from .tokens import SHORT

FEW = (1, 2, 3, 7)  # a model that accepts these and the longest takes all


@dataclass(frozen=True)
class Lengths:
    """Multiples of a step, from the least to the longest."""

    least: int
    step: int
    longest: int

    def accepts(self, time: int) -> bool:
        """Whether a length is one of them."""
        inside = self.least <= time <= self.longest
        return inside and time % self.step == 0

    def fit(self, time: int) -> int:
        """Return the longest that is no longer, else the least."""
        time = min(time, self.longest)
        return max(time - time % self.step, self.least)

    def __str__(self) -> str:
        if self.step == 1:
            return f"lengths from {self.least} to {self.longest}"
        return f"multiples of {self.step} from {self.least} to {self.longest}"


def find_lengths(
    accepts: Callable[[int], bool], longest: int, known: int
) -> Lengths:
    """Return the lengths that a model accepts, as far as some of them show.

    One is known; none over the longest is tried.
    """
    accepts = cache(accepts)
    if all(accepts(t) for t in (*FEW, longest) if t <= longest):
        return Lengths(1, 1, longest)
    powers = [1 << k for k in range(5, longest.bit_length())]
    for some in (range(1, min(SHORT, longest) + 1), powers, [known]):
        taken = [t for t in some if accepts(t)]
        if taken:
            break
    step = min((b - a for a, b in pairwise(taken)), default=taken[0])
    least = low = taken[-1] - taken[-1] % step
    while least > step and accepts(least - step):
        least -= step
    high = longest - longest % step + step
    if accepts(high - step):
        low = high - step
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return Lengths(least, step, low)
