"""What a diff by value found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from .parting import Parting
from .places import Place

NOWHERE = "nowhere on the other side"


@dataclass(frozen=True)
class Pair:
    """Two lines that compute one value.

    Attributes:
        left: the line of the left.
        right: the line of the right.
        shape: of the left's value.
        difference: the largest absolute one.
        order: their numbers in the two runs.
    """

    left: Place
    right: Place
    shape: tuple[int, ...]
    difference: float
    order: tuple[int, int]


@dataclass(frozen=True)
class Alone:
    """A line whose value the other side does not have.

    Attributes:
        place: the line.
        shape: of its value.
        why: what is known about it.
        order: its number in its run.
    """

    place: Place
    shape: tuple[int, ...]
    why: str
    order: int


@dataclass(frozen=True)
class Found:
    """What diff_by_value found.

    Attributes:
        names: of the two sides.
        pairs: lines that compute one value, in the order of the left.
        alone: for "left" and "right" the lines without counterpart.
        parted: where the two part, None where they are one function.
        nearest: in two models that share nothing, the nearest values.
        notes: what could not be recorded, and the precision of the run.
    """

    names: tuple[str, str]
    pairs: Sequence[Pair]
    alone: Mapping[str, Sequence[Alone]]
    parted: Parting | None
    nearest: Sequence[Pair]
    notes: Sequence[str]

    @property
    def same(self) -> bool:
        """Whether the two are one function on these tokens."""
        return self.parted is None

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that were seen."""
        places = [place for p in self.pairs for place in (p.left, p.right)]
        for lines in self.alone.values():
            places += [line.place for line in lines]
        return sorted({p.layer for p in places if p.layer is not None})

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
                    "left": pair.left.to_dict(),
                    "right": pair.right.to_dict(),
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
