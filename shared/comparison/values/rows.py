"""The rows of a diff by value, and the line where two models part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ...running.places import Place
from ...running.tolerances import FACTOR_SHARE

NOWHERE = "nowhere on the other side"
MOVED = "in another order"


@dataclass(frozen=True)
class Row:
    """A value: the line that computes it on the left, the right, or both."""

    left: Place | None  # the line of the left
    right: Place | None  # the line of the right
    shape: tuple[int, ...]  # of the value
    difference: float | None = None  # the largest; None for a line alone
    why: str = ""  # what is known about a line alone
    # number of the value in the left's run and in the right's, or -1
    order: tuple[int, int] = (-1, -1)
    times: int = 1  # how many values these compute in turn, head by head

    def __str__(self) -> str:
        left, right = (str(side or "-") for side in (self.left, self.right))
        apart = self.why or "alone"
        if self.difference is not None:
            apart = f"{self.difference:.2g} apart"
        return f"{left} | {right} | {self.shape} | {apart}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def place(self) -> Place:
        """The line; of a pair the left's."""
        place = self.left or self.right
        assert place is not None
        return place

    @property
    def layer(self) -> int | None:
        """The layer of either."""
        places = [p for p in (self.left, self.right) if p is not None]
        return next((p.layer for p in places if p.layer is not None), None)

    @property
    def key(self) -> object:
        """What is the same in each layer that does the same."""
        sides = [p and replace(p, layer=None) for p in (self.left, self.right)]
        return *sides, self.shape, self.times


@dataclass(frozen=True, repr=False)
class Divergence(Row):
    """Where two models part.

    The left is the line nearest to the right's, whose value no value of the
    left equals. The difference is None where no value of the left is near.
    """

    # largest difference of what the right's line is computed from; None where
    # the left has not all of it in the same order
    inputs: float | None = None
    factor: float | None = None  # c: the right is c times the left
    cause: str = ""  # what the factor suggests
    # the right's line and up to two others that may be at fault: the one that
    # the left goes on from, those that lay out its inputs, those that follow
    shown: tuple[Place, ...] = ()
    scores: float | None = 0.0  # how far apart, if both sides have them
    before: Place | None = None  # a step of the left alone on the way there
    in_order: bool = False  # whether a factor of 1 holds in the same order

    @property
    def layer(self) -> int | None:
        """The layer of the right, else of the left."""
        return Row(self.right, self.left, self.shape).layer

    def __str__(self) -> str:
        assert self.right is not None
        layer = "" if self.layer is None else f", layer {self.layer}"
        given = ""
        if self.inputs is not None:
            bound = f" to {self.inputs:.1g}" if self.inputs else ""
            given = f"its inputs are equal{bound}, "
        left = str(self.left)
        if self.left is not None and self.left.of_module:
            left += f" ({self.left.of_module})"
        apart = ""
        if self.difference is not None:
            apart = f", {self.difference:.2g} apart"
        if self.factor is not None and abs(self.factor - 1) < FACTOR_SHARE:
            order = "" if self.in_order else " in another order"
            output = f"its numbers are those of {left}{order}"
        elif self.factor is not None:
            output = f"it is {self.factor:.4g} times {left}"
        elif self.right.recorded:
            output = f"expected from {left}{apart}"
        else:
            goes_on = "nearest is" if apart else "the left continues at"
            output = "no value on the left equals its output; "
            output += f"{goes_on} {left}{apart}"
        if self.cause:
            output += f" ({self.cause})"
        if self.before is not None:
            output += f"; the left first computes {self.before}"
        if others := " and ".join(map(str, self.shown[1:])):
            output += f"; look also at {others}"
        if self.scores is not None:
            output += f"; scores {self.scores:.2g} apart"
        place = f"{self.right}{self.right.site}{layer}"
        return f"they part at {place}: {given}{output}"


@dataclass(frozen=True)
class Section:
    """Rows of one layer and of those that do the same, or between layers."""

    layers: tuple[int, ...]
    rows_by_layer: Sequence[Sequence[Row]]

    @property
    def rows(self) -> Sequence[Row]:
        """The rows that stand for all layers: the first one's."""
        return self.rows_by_layer[0]

    def does_more(self, place: Place) -> bool:
        """Whether other rows have the line with another operation."""
        return not place.inside and any(
            other is not None
            and replace(other, op=place.op, layer=place.layer) == place
            and other.op != place.op
            for row in self.rows
            for other in (row.left, row.right)
        )

    @property
    def title(self) -> str:
        """Which layers these are, "" between layers."""
        first, *others = self.layers or (None,)
        if not others:
            return "" if first is None else f"layer {first}"
        rows = chain.from_iterable(self.rows_by_layer)
        apart = max(row.difference or 0.0 for row in rows)
        more = f"layers {others[0]} to {others[-1]} run"
        if len(others) == 1:
            more = f"layer {others[0]} runs"
        return (
            f"layer {first}; {more} the same lines; there the sides differ by "
            f"{apart:.1g}"
        )
