"""What a run that carries codes leaves: its steps, and what it rests on."""

from dataclasses import dataclass, field

from torch import Tensor

from ..places import Place
from .call import Call

OUTSIDE = "outside"  # a tensor that no operation made


@dataclass
class Step:
    """An operation that was carried out, for the control and the way.

    Attributes:
        name: of the operation.
        place: where the model calls it.
        outs: its results; codes: theirs.
        call: what it was, and the codes of its arguments.
        routed: whether results that route tokens were taken as known.
    """

    name: str
    place: Place
    outs: list[Tensor]
    codes: list[Tensor]
    call: tuple[Call, dict[int, Tensor]] | None
    routed: bool = False


@dataclass
class Notes:
    """What a run rests on, and what it did not understand.

    Each by its place: what Python code read of the tokens, which of these
    numbers left torch, which finite masks count as minus infinity, which do
    not, where a token may hide all that such a mask leaves, unknown
    operations, and losses of scores that depend on their targets.
    """

    reads: dict[Place, int] = field(default_factory=dict)
    left: dict[Place, str] = field(default_factory=dict)
    masks: dict[Place, float] = field(default_factory=dict)
    weak: dict[Place, float] = field(default_factory=dict)
    padding: dict[Place, float] = field(default_factory=dict)
    unknown: dict[Place, str] = field(default_factory=dict)
    routed: dict[Place, str] = field(default_factory=dict)
    compared: dict[Place, str] = field(default_factory=dict)

    def update(self, other: "Notes") -> None:
        """Add what another run rests on."""
        for name, found in vars(other).items():
            getattr(self, name).update(found)
