"""Prove that a model that returns only a loss leaks nothing.

A cross-entropy compares the scores of a position with the position's target.
The loss depends on all tokens. But it leaks nothing if no row of scores
depends on its target, on later tokens, or on another loss. Such a loss is
*sound*. Weights of ids and of positions may depend on any token: they change
how much a position counts, but not its scores. If tokens also reach the
returned loss by another path, the proof stays open.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from .call import Call
from .codes import FREE, KNOWN, full, over
from .shadows import Shadows, Step

Tokens = Int[Tensor, "batch time"]
CROSS_ENTROPY = ("nll_loss_forward", "nll_loss2d_forward")
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
# operations that count marked positions, and that weight losses by counts
COUNTING = COMPARISONS | {"_to_copy", "sum", "clamp", "clamp_min", "mean"}
COUNTING |= {"logical_not", "logical_and", "logical_or", "bitwise_not"}
COUNTING |= {"bitwise_and", "bitwise_or", "mul", "clone", "reciprocal"}
WEIGHTING = {"mul", "div", "add", "sub", "sum", "mean", "where", "_to_copy"}
WEIGHTING |= {"masked_fill", "clone", "neg"}


class _Held:
    """Tensors of one kind, by storage; no other tensor gets their address."""

    def __init__(self) -> None:
        self._tensors = dict[int, Tensor]()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._tensors

    def add(self, tensor: Tensor) -> None:
        self._tensors[tensor.untyped_storage()._cdata] = tensor

    def remove(self, tensor: Tensor) -> None:
        self._tensors.pop(tensor.untyped_storage()._cdata, None)


class Compared:
    """A tape (called with each step) that clears the codes of sound losses.

    It also follows what is computed from a loss, because scores must not be.

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
        self.after = _Held()  # computed from a loss and anything else
        self.losses = _Held()  # computed from sound losses and counts
        # booleans and numbers that say which tokens or targets count
        self.counts = _Held()

    def __call__(self, step: Step) -> None:
        """Inspect a step as it runs."""
        call = step.call
        if call is None:  # a view
            return
        given = call.given_tensors()
        compares = step.name in CROSS_ENTROPY
        sound = compares and self._is_sound(step)
        after = compares or any(t in self.after for t in given)
        loss = sound or self._is_weighted(step.name, call, given)
        count = self._is_count(step.name, call, given)
        for out in step.outs:
            if loss:
                self.shadows.mark(out, full(FREE, 0))
            storage = out.untyped_storage()
            size = out.numel() * out.itemsize
            whole = out.is_contiguous() and size == storage.nbytes()
            for belongs, held in ((loss, self.losses), (count, self.counts)):
                if belongs and (whole or out in held):
                    held.add(out)
                else:
                    held.remove(out)
            if after:
                self.after.add(out)
            elif whole:
                self.after.remove(out)

    def _is_weighted(self, name: str, call: Call, given: list[Tensor]) -> bool:
        """Return whether results are sound losses, weighted by counts."""
        return (
            name in WEIGHTING
            and any(t in self.losses for t in given)
            and all(
                t in self.losses or t in self.counts or call.latest(t) == KNOWN
                for t in given
            )
        )

    def _is_count(self, name: str, call: Call, given: list[Tensor]) -> bool:
        """Return whether results say which tokens or targets count."""
        numbers = any(t.is_floating_point() for t in given)
        if name in COMPARISONS and not numbers:
            return all(call.latest(t) != FREE for t in given)
        # no known vector, which might be the table of a second model
        return name in COUNTING and all(
            t in self.counts or (call.latest(t) == KNOWN and t.dim() == 0)
            for t in given
        )

    def _is_sound(self, step: Step) -> bool:
        """Return whether a cross-entropy is sound; note one that is not."""
        call = step.call
        assert call is not None
        axis = 0 if call["self"].dim() == 1 else 1
        rows = over(call.plain("self"), axis).squeeze(axis)
        targets = call.plain("target")
        left_out = (targets == KNOWN) & (call["target"] < 0)
        late = (rows >= targets) & (rows > FREE) & ~left_out
        if (
            bool(late.any())
            or call["self"] in self.after
            or not self._are_placed(call["target"], targets)
        ):
            self.shadows.notes.compared.setdefault(step.place, step.name)
            return False
        return True

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
