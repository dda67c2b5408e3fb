"""A model that returns only a loss is followed to what that compares.

A cross-entropy compares the scores of a position with its target. Where no row
of scores depends on its target, nor on a token as late, the loss teaches
nothing of the future, and its number may depend on all tokens. Any other way
from the tokens to the loss keeps the proof open.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from .codes import FREE, KNOWN, over
from .shadows import Shadows, Step

Tokens = Int[Tensor, "batch time"]
CROSS_ENTROPY = ("nll_loss_forward", "nll_loss2d_forward")


class Compared:
    """A tape that frees what sound cross-entropies return.

    Args:
        shadows: carries the codes, twice the position of a token; a target's
            lies between those of the tokens before it and its own.
        tokens, targets: that the model is given.
        offset: from a token's code to that of the target next to it.
    """

    def __init__(
        self, shadows: Shadows, tokens: Tokens, targets: Tokens, offset: int
    ):
        self.shadows, self.offset = shadows, offset
        self.tokens, self.targets = tokens, targets

    def __call__(self, step: Step) -> None:
        """Look at a step, as it is carried out."""
        if step.name not in CROSS_ENTROPY or step.call is None:
            return
        call = step.call
        axis = 0 if call["self"].dim() == 1 else 1
        rows = over(call.plain("self"), axis).squeeze(axis)
        targets = call.plain("target")
        left_out = (targets == KNOWN) & (call["target"] < 0)
        late = (rows >= targets) & (rows > FREE) & ~left_out
        if bool(late.any()) or not self._are_placed(call["target"], targets):
            self.shadows.notes.compared.setdefault(step.place, step.name)
            return
        for out in step.outs:
            self.shadows.mark(out, FREE)

    def _are_placed(self, targets: Tensor, codes: Tensor) -> bool:
        """Whether targets are those of the positions that their codes name.

        A code is an upper bound, which would allow too much here. A negative
        target is left out of the loss.
        """
        codes = codes.expand(targets.shape).long()
        given = codes % 2 == 1
        at = torch.where(given, codes - self.offset, codes) // 2
        at = at.clamp(0, self.tokens.size(1) - 1)
        ids = torch.where(given, self.targets[:, at], self.tokens[:, at])
        return bool(((ids == targets).any(0) | (targets < 0)).all())
