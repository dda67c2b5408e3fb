"""How far a model's own rounding brings its values from their float64 ones."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .side import Side


class Exact:
    """The float64 run of a side that runs in a coarser dtype."""

    def __init__(self, side: Side, run: Side):
        self.run = run
        here, there = _by_line(side), _by_line(run)
        # a line that casts may compute in one of the two runs alone
        self.numbers = {
            number: there[line][i]
            for line, numbers in here.items()
            if len(numbers) == len(there.get(line, ()))
            for i, number in enumerate(numbers)
        }
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
        run = Side(side.subject, side.tokens)
    except ValueError:
        return None
    return Exact(side, run) if run.doubled else None


def _by_line(side: Side) -> dict[object, list[int]]:
    """Return the numbers of what each line computes, in the order of a run."""
    found: dict[object, list[int]] = {}
    for value in side.values:
        place = value.place
        line = place.path, place.line, place.span, place.op, place.inside
        found.setdefault((*line, place.layer), []).append(value.number)
    return found
