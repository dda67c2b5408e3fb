"""Describe the rows of a diff by value, and the first difference."""

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

    left: Place | None  # the line of the left side, None if it has none
    right: Place | None  # the line of the right side, None if it has none
    shape: tuple[int, ...]  # shape of the value
    difference: float | None = None  # the largest difference; None if unpaired
    why: str = ""  # what is known about the line, if it is unpaired
    # the value's number in the left's run, and in the right's run; -1 if none
    order: tuple[int, int] = (-1, -1)
    times: int = 1  # how many values the line computed in turn, head by head

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
        """Return the row's line; if both models have one, the left model's."""
        place = self.left or self.right
        assert place is not None
        return place

    @property
    def layer(self) -> int | None:
        """Return the left line's layer, or else the right line's."""
        places = [p for p in (self.left, self.right) if p is not None]
        return next((p.layer for p in places if p.layer is not None), None)

    @property
    def key(self) -> object:
        """Return a key that is equal for the same row of another layer."""
        sides = [p and replace(p, layer=None) for p in (self.left, self.right)]
        return *sides, self.shape, self.times


@dataclass(frozen=True, repr=False)
class Divergence(Row):
    """The first difference of two models.

    The right's line is the first whose value the left model lacks. The left's
    line computes the nearest value. The difference is None if no value of the
    left model is near.
    """

    # the largest difference of the inputs of the right's line; None if the
    # left does not have all of them in the same order
    inputs: float | None = None
    factor: float | None = None  # c: the right is c times the left
    cause: str = ""  # in words, the cause that the factor suggests
    # the right's line, and up to two others that may be at fault
    shown: tuple[Place, ...] = ()
    # largest difference of scores; None: a side has no scores
    scores: float | None = 0.0
    before: Place | None = None  # an earlier step that only the left takes
    in_order: bool = False  # whether the entries of both are in the same order

    @property
    def layer(self) -> int | None:
        """Return the layer of the right's line, or else the left's."""
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
        return f"they first differ at {place}: {given}{output}"


@dataclass(frozen=True)
class Section:
    """The rows of layers that run the same lines, or those between layers."""

    layers: tuple[int, ...]
    rows_by_layer: Sequence[Sequence[Row]]

    @property
    def rows(self) -> Sequence[Row]:
        """Return the rows of the first layer, which stand for all layers."""
        return self.rows_by_layer[0]

    def does_more(self, place: Place) -> bool:
        """Return whether this line has another row, for another operation."""
        return not place.inside and any(
            other is not None
            and replace(other, op=place.op, layer=place.layer) == place
            and other.op != place.op
            for row in self.rows
            for other in (row.left, row.right)
        )

    @property
    def title(self) -> str:
        """Return which layers the section covers, "" between layers."""
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
