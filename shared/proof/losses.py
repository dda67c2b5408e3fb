"""Prove that a model that returns only a loss leaks nothing.

A cross-entropy compares the scores of a position with the position's target.
The loss depends on all tokens. But it leaks nothing if no row of scores
depends on its target or on later tokens. If tokens also reach the loss by
another path, the proof stays open.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from .codes import FREE, KNOWN, over
from .shadows import Shadows, Step

Tokens = Int[Tensor, "batch time"]
CROSS_ENTROPY = ("nll_loss_forward", "nll_loss2d_forward")


class Compared:
    """A tape (called with each step) that clears the codes of sound losses.

    Args:
        shadows: carries the codes. A token's code is twice its position. A
            target's code is 1 less than that of the token it equals.
        tokens, targets: the arguments of the model.
        offset: a target's code minus that of the token at its position.
    """

    def __init__(
        self, shadows: Shadows, tokens: Tokens, targets: Tokens, offset: int
    ):
        self.shadows, self.offset = shadows, offset
        self.tokens, self.targets = tokens, targets

    def __call__(self, step: Step) -> None:
        """Inspect a step as it runs."""
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
        """Return whether each target equals the id that its code stands for.

        A code is only an upper bound, so the target might be an earlier token.
        Negative targets are not checked, because the loss ignores them.
        """
        codes = codes.expand(targets.shape).long()
        given = codes % 2 == 1
        at = torch.where(given, codes - self.offset, codes) // 2
        at = at.clamp(0, self.tokens.size(1) - 1)
        ids = torch.where(given, self.targets[:, at], self.tokens[:, at])
        return bool(((ids == targets).any(0) | (targets < 0)).all())
