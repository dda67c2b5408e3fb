"""What the search tries, and what it finds."""

import math
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Mode:
    """One way to call a model, and what a failure says about it."""

    description: str = ""
    training: bool = False  # in train mode, each call with the same seed
    grad: bool = False  # whether gradients are recorded
    # where what an attention mask shows starts and ends, as shares of the
    # length; None: no mask is given
    visible: tuple[float, float] | None = None

    def shown(self, time: int) -> range:
        """Return the positions that no mask hides."""
        first, last = self.visible or (0.0, 1.0)
        return range(int(first * time), math.ceil(last * time))


EVAL = Mode()


@dataclass(frozen=True)
class Trial:
    """Sequences that differ from others from a split on, row by row."""

    base: Int[Tensor, "rows time"]
    changed: Int[Tensor, "rows time"]
    splits: list[int]
    mode: Mode

    def before(self, row: int) -> slice:
        """Return the positions that must not change in a row."""
        shown = self.mode.shown(self.base.size(1))
        return slice(shown.start, min(shown.stop, self.splits[row]))

    def rows(self, index: list[int]) -> "Trial":
        """Return the trial of these rows alone."""
        splits = [self.splits[i] for i in index]
        return Trial(self.base[index], self.changed[index], splits, self.mode)


@dataclass(frozen=True)
class Leak:
    """A confirmed one: in this row the position sees what follows it."""

    trial: Trial
    row: int
    position: int
    size: float
    noise: float
    dtype: str
