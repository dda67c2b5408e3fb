"""What a diff by value found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from .parting import Parting
from .places import Place
from .side import Side

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
        return *sides, self.shape


@dataclass(frozen=True)
class Found:
    """What diff_by_value found.

    Attributes:
        names: of the two sides.
        sides: the two, which can be run again for their values.
        pairs: lines that compute one value, in the order of the left.
        alone: for "left" and "right" the lines without counterpart.
        parted: where the two part, None where they are one function.
        nearest: in two models that share nothing, the nearest values.
        notes: what could not be recorded, and the precision of the run.
    """

    names: tuple[str, str]
    sides: tuple[Side, Side]
    pairs: Sequence[Row]
    alone: Mapping[str, Sequence[Row]]
    parted: Parting | None
    nearest: Sequence[Row]
    notes: Sequence[str]

    @property
    def same(self) -> bool:
        """Whether the two are one function on these tokens."""
        return self.parted is None

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that were seen."""
        rows = [*self.pairs, *self.alone["left"], *self.alone["right"]]
        return sorted({r.layer for r in rows if r.layer is not None})

    @property
    def shares_nothing(self) -> bool:
        """Whether no value of one side is on the other."""
        return not self.pairs

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        if self.parted is None:
            return (
                f"one function: {len(self.pairs)} values of the left are on "
                f"the right, the last ones {self.pairs[-1].difference:.1g} "
                f"apart"
            )
        if self.shares_nothing:
            near = "; ".join(
                f"{pair.left} and {pair.right}, {pair.difference:.2g} apart"
                for pair in self.nearest
            )
            return (
                "two functions that share no value, not even at the "
                "embedding: are these the same weights? "
                + (
                    f"The nearest values: {near}"
                    if near
                    else "No two values have the same size"
                )
            )
        return str(self.parted)

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        parted = self.parted
        return {
            "same": self.same,
            "sentence": self.sentence,
            "parted": None
            if parted is None
            else {
                "left": parted.left.to_dict(),
                "right": parted.right.to_dict(),
                "layer": parted.layer,
                "inputs": parted.inputs,
                "difference": parted.difference,
            },
            "pairs": [
                {
                    "left": pair.left and pair.left.to_dict(),
                    "right": pair.right and pair.right.to_dict(),
                    "shape": list(pair.shape),
                    "difference": pair.difference,
                }
                for pair in self.pairs
            ],
            "alone": {
                side: [
                    alone.place.to_dict()
                    | {"shape": list(alone.shape), "why": alone.why}
                    for alone in found
                ]
                for side, found in self.alone.items()
            },
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from rich.console import Console

        from .terminal import show_found

        text = StringIO()
        console = Console(file=text, width=120, highlight=False)
        show_found(console, self)
        return "\n".join(map(str.rstrip, text.getvalue().splitlines()))
