"""The ways of running a model: a table, in one place.

A way says how a call is made. The copy of the model that is called (its
dtype, larger weights) is the matter of `variant` and `larger_weights`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from .meeting.calling import MASK, Caller


@dataclass(frozen=True)
class Way:
    """One way to call a model, and what a failure says about it."""

    name: str = ""  # "in train mode", "with gradients recorded", ...
    training: bool = False  # in train mode, where each call has one seed
    grad: bool = False  # whether gradients are recorded
    # where what an attention mask shows starts and ends, as shares of the
    # length; None: no mask is given
    visible: tuple[float, float] | None = None

    @property
    def mode(self) -> str:
        """The mode as messages name it."""
        return "in train mode" if self.training else "in eval mode"

    def shown(self, time: int) -> range:
        """Return the positions that no mask hides."""
        first, last = self.visible or (0.0, 1.0)
        return range(int(first * time), math.ceil(last * time))

    def arguments(
        self, tokens: Int[Tensor, "batch time"]
    ) -> dict[str, Int[Tensor, "batch time"]]:
        """Return what a call gets beside its tokens."""
        if self.visible is None:
            return {}
        mask = torch.zeros_like(tokens)
        mask[:, self.shown(tokens.size(1))] = 1
        return {MASK: mask}


EVAL = Way()
TRAIN = Way("in train mode", training=True, grad=True)
WITH_GRADIENTS = Way("with gradients recorded", grad=True)
TRAIN_WITHOUT_GRADIENTS = Way("in train mode without gradients", training=True)
SHOWN = {  # by a mask, as shares of the length
    "a full": (0.0, 1.0),
    "a left-padded": (0.3, 1.0),
    "a right-padded": (0.0, 0.7),
}
MASKED = tuple(
    Way(f"{where}with {name} attention mask", training, training, visible)
    for where, training in (("", False), ("in train mode ", True))
    for name, visible in SHOWN.items()
)


def masked_ways(caller: Caller) -> tuple[Way, ...]:
    """Return the ways with an attention mask, if the model takes one."""
    return MASKED if caller.takes_mask else ()
