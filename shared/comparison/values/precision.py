"""How far a model's own rounding brings its values from their float64 ones."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .naming import pair_lines
from .side import Side


class Exact:
    """The float64 run of a side that runs in a coarser dtype."""

    def __init__(self, side: Side, run: Side):
        self.run = run
        # a line that casts may compute in one of the two runs alone
        pairs = pair_lines(side, run, lambda place: place)
        self.numbers = {ours.number: theirs.number for ours, theirs in pairs}
        self.numbers[side.normalised] = run.normalised

    def visit(
        self, numbers: Iterable[int], visitor: Callable[[int, Tensor], None]
    ) -> None:
        """Hand out the float64 values with the numbers of the side."""
        known = {self.numbers[n]: n for n in numbers if n in self.numbers}
        self.run.visit(known, lambda n, value: visitor(known[n], value))


def in_float64(side: Side) -> Exact | None:
    """Return the float64 run of a side, None where it is one or has none."""
    if not side.nudgeable or side.dtype == torch.float64:
        return None
    try:
        run = Side(side.subject, side.tokens, reduce=side.reduce)
    except ValueError:
        return None
    return Exact(side, run) if run.doubled else None
