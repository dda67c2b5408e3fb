"""What the search tries, and what it finds."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Mode:
    """One way to call a model.

    Attributes:
        description: what a failure says about it.
        training: whether in train mode, each call with the same seed.
        grad: whether gradients are recorded.
        padded: None: no mask is given; else the share of each sequence that
            an attention mask hides on the left.
    """

    description: str = ""
    training: bool = False
    grad: bool = False
    padded: float | None = None


EVAL = Mode()


@dataclass(frozen=True)
class Trial:
    """Sequences that differ from others from a split on, row by row."""

    base: Int[Tensor, "rows time"]
    changed: Int[Tensor, "rows time"]
    splits: list[int]
    mode: Mode

    @property
    def start(self) -> int:
        """First position that no mask hides."""
        return int((self.mode.padded or 0.0) * self.base.size(1))

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
