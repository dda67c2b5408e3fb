"""The rows of a diff by value, and the line where two models part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...invariants.places import Place

NOWHERE = "nowhere on the other side"
MOVED = "in another order"


@dataclass(frozen=True)
class Row:
    """A value: the line that computes it on the left, the right, or both.

    Attributes:
        left: the line of the left, None where only the right has it.
        right: the line of the right, None where only the left has it.
        shape: of the value.
        difference: the largest absolute one, None for a line alone.
        why: what is known about a line alone.
        order: number of the value in the left's run and in the right's, -1
            where a side has none.
        times: how many values these lines compute in turn, head by head.
    """

    left: Place | None
    right: Place | None
    shape: tuple[int, ...]
    difference: float | None = None
    why: str = ""
    order: tuple[int, int] = (-1, -1)
    times: int = 1

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

    Attributes:
        inputs: largest difference of what the right's line is computed
            from; None where the left has not all of it in the same order.
        factor: c where the right's numbers are c times the left's, in any
            order, else None.
        cause: what the factor suggests, or "".
        shown: the right's line and up to two others that may be at fault:
            the one that the left goes on from, those that lay out its
            inputs, and those that follow.
        scores: how far the log-probabilities are apart, if both sides have
            them.
        before: a step that the left alone takes on the way there.
        in_order: whether a factor of 1 holds without another order.
    """

    inputs: float | None = None
    factor: float | None = None
    cause: str = ""
    shown: tuple[Place, ...] = ()
    scores: float | None = 0.0
    before: Place | None = None
    in_order: bool = False

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
        cause = f" ({self.cause})" if self.cause else ""
        left = str(self.left)
        if self.left is not None and self.left.of_module:
            left += f" ({self.left.of_module})"
        if self.factor is not None and abs(self.factor - 1) < 1e-6:
            order = "" if self.in_order else " in another order"
            output = f"its numbers are those of {left}{order}"
        elif self.factor is not None:
            output = f"it is {self.factor:.4g} times {left}"
        else:
            nowhere = "no value on the left equals its output; "
            output = f"{nowhere}the left continues at {left}"
            if self.right.recorded:
                output = f"expected from {left}"
            elif self.difference is not None:
                output = f"{nowhere}nearest is {left}"
            if self.difference is not None:
                output += f", {self.difference:.2g} apart"
        output += cause
        if self.before is not None:
            output += f"; the left first computes {self.before}"
        others = " and ".join(map(str, self.shown[1:]))
        also = f"; look also at {others}" if others else ""
        return (
            f"they part at {self.right}{self.right.site}{layer}: {given}"
            f"{output}{also}"
            + (
                ""
                if self.scores is None
                else f"; scores {self.scores:.2g} apart"
            )
        )


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
        operations = {
            other.op
            for row in self.rows
            for other in (row.left, row.right)
            if other is not None
            and (other.path, other.line) == (place.path, place.line)
            and other.span == place.span
            and not other.inside
        }
        return len(operations) > 1 and not place.inside

    @property
    def title(self) -> str:
        """Which layers these are, "" between layers."""
        first, *others = self.layers or (None,)
        if not others:
            return "" if first is None else f"layer {first}"
        apart = max(
            row.difference or 0.0
            for rows in self.rows_by_layer
            for row in rows
        )
        more = f"layers {others[0]} to {others[-1]} run"
        if len(others) == 1:
            more = f"layer {others[0]} runs"
        more += f" the same lines; there the sides differ by {apart:.1g}"
        return f"layer {first}; {more}"
