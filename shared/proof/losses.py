"""Prove that a model that returns only a loss leaks nothing.

A cross-entropy compares the scores of a position with the position's target.
The loss depends on all tokens. But it leaks nothing if no row of scores
depends on its target or on later tokens. Such a loss is *sound*, and so is
what is computed from sound losses, weights and *counts*. Counts are computed
only from tokens and targets, as the number of targets that are not padding. If
tokens also reach the returned loss by another path, the proof stays open.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from .call import Call
from .codes import FREE, KNOWN, LONGEST, over
from .shadows import Shadows, Step

Tokens = Int[Tensor, "batch time"]
CROSS_ENTROPY = ("nll_loss_forward", "nll_loss2d_forward")


class _Held:
    """The tensors of one kind; no other tensor gets their addresses."""

    def __init__(self, *tensors: Tensor):
        self._by_storage = dict[int, Tensor]()
        for tensor in tensors:
            self.put(tensor, True)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._by_storage

    def put(self, tensor: Tensor, belongs: bool) -> None:
        """Add a tensor that was just written, or remove its storage.

        If only a part of a storage was written, the rest decides too.
        """
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.itemsize == storage.nbytes()
        if belongs and (whole or tensor in self):
            self._by_storage[storage._cdata] = tensor
        else:
            self._by_storage.pop(storage._cdata, None)


class Compared:
    """A tape (called with each step) that follows sound losses.

    A sound loss depends on all tokens. So if scores are computed from it, the
    loss of these scores is not sound.

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
        self.sound, self.counts = _Held(), _Held(tokens, targets)

    def __call__(self, step: Step) -> None:
        """Inspect a step as it runs."""
        if step.call is None:  # a view
            return
        loss = step.name in CROSS_ENTROPY
        sound = self._compares(step) if loss else self._goes_on(step.call)
        count = not sound and self._counts(step.call)
        for out in step.outs:
            if sound and loss:
                self.shadows.mark(out, LONGEST)
            self.sound.put(out, sound)
            self.counts.put(out, count)

    def _goes_on(self, call: Call) -> bool:
        """Return whether results are sound as well."""
        given = call.given_tensors()
        return any(t in self.sound for t in given) and all(
            t in self.sound or t in self.counts or call.latest(t) <= FREE
            for t in given
        )

    def _counts(self, call: Call) -> bool:
        """Return whether results depend on tokens, and on no weight."""
        return all(
            t in self.counts or call.latest(t) == KNOWN
            for t in call.given_tensors()
        )

    def _compares(self, step: Step) -> bool:
        """Return whether a cross-entropy is sound; note scores that are not.

        If its weights of the ids depend on tokens, it is not sound.
        """
        call = step.call
        assert call is not None
        axis = 0 if call["self"].dim() == 1 else 1
        rows = over(call.plain("self"), axis).squeeze(axis)
        targets = call.plain("target")
        left_out = (targets == KNOWN) & (call["target"] < 0)
        late = (rows >= targets) & (rows > FREE) & ~left_out
        if bool(late.any()) or not self._are_placed(call["target"], targets):
            self.shadows.notes.compared.setdefault(step.place, step.name)
            return False
        weight = call.get("weight")
        return weight is None or call.latest(weight) <= FREE

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
