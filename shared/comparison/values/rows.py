"""What a diff by value tells of values: rows, and where two models part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .places import Place

NOWHERE = "nowhere on the other side"


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


@dataclass(frozen=True)
class Parting(Row):
    """Where two models part.

    The left is the line nearest to the right's, whose value is nowhere on
    the left. The difference is None where no value of the left is near.

    Attributes:
        inputs: largest difference of what the right's line is computed
            from; None where it is computed from weights and tokens alone.
        factor: c where the right's numbers are c times the left's, in any
            order, else None.
    """

    inputs: float | None = None
    factor: float | None = None

    @property
    def layer(self) -> int | None:
        """The layer of the right, else of the left."""
        return Row(self.right, self.left, self.shape).layer

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        given = ""
        if self.inputs is not None:
            bound = f" to {self.inputs:.1g}" if self.inputs else ""
            given = f"its inputs are equal{bound}, "
        start = f"they part at {self.right}{layer}: {given}its output is "
        if self.factor is not None and abs(self.factor - 1) < 1e-6:
            apart = "the same numbers in another order"
        elif self.factor is not None:
            apart = f"which it is {self.factor:.4g} times"
        elif self.difference is not None:
            apart = f"{self.difference:.2g} apart"
        else:
            return f"{start}nowhere on the left, which goes on at {self.left}"
        return f"{start}nowhere on the left; nearest is {self.left}, {apart}"


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
        more = f"layers {others[0]} to {others[-1]}"
        if len(others) == 1:
            more = f"layer {others[0]}"
        return f"layer {first}; {more} as layer {first}, {apart:.1g} apart"
