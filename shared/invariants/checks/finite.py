"""Scores and gradients have no NaN and no infinity."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...running.context import during
from ...running.errors import NotFinite
from ...running.losses import cross_entropy
from ...running.operations import operations_through
from ...running.places import Place, find_place
from ...running.ranks import local
from ...running.rounding import differ
from ...running.variant import Variant, own, redraw_zeros, scale_up
from ...running.ways import (
    EXTREME,
    TRAIN,
    TRAIN_WITHOUT_GRADIENTS,
    WITH_GRADIENTS,
)
from ..check import Subject, check

# most tokens of a text with a backward pass, which takes much memory
GRADIENTS = 256


@check(share=1)
def check_finite(subject: Subject) -> str:
    """Neither scores nor gradients are ever NaN or infinite.

    Why: after one step of an optimiser, one NaN is in every weight.
    How: texts have random ids, begin with id 0, or repeat one id. Their
    lengths go from one token to the longest. The model runs in eval mode and,
    with several dropout masks, in train mode. If a model's softmax does not
    subtract the maximum, weights are scaled up until the exponentials
    overflow.
    If it fails: usual causes are dropout on masked scores, a row of a mask
    that hides every token, and a division by a deviation that can be 0. A note
    names ids whose scores are minus infinity everywhere, or the lowest finite
    number. All checks leave these ids out.
    Reports: dropout on scores of -inf ("GPT from Scratch", listing 5).
    """
    generator = subject.generator()
    for variant, time, rows, calls in _sizes(subject):
        with subject.budget.part(variant.case.name, time, 1 / 3):
            tokens = subject.draw(5, time, generator)
            tokens[1, 0] = tokens[2] = 0
            tokens[3] = subject.vocab_size - 1
            tokens[4] = tokens[4, 0].clone()
            for seed in range(calls):
                _try(variant, tokens[:rows], seed)
    _require_softmax(subject)
    modes = "" if subject.is_program else ", eval and train mode"
    return f"lengths 1 to {subject.budget.reached}{modes}"


def _require_softmax(subject: Subject) -> None:
    """Require that a softmax subtracts its maximum, so it cannot overflow.

    Subtracting the largest number before the exponential does not change the
    scores.
    """
    if not (subject.is_module and subject.builder.can_copy):
        return
    variant, tokens = own(subject), subject.draw(2, 8)
    # weights of zeros would hide exponentials
    redraw_zeros(variant.model, subject.generator())
    scores = variant.scores(tokens)
    with operations_through(_Exponentials(shift=True)) as seen:
        moved = differ(variant.scores(tokens), scores)
    if seen.place is None or moved:
        return
    for size in EXTREME[::-1]:
        scale_up(variant.model, size)
        with operations_through(_Exponentials()) as seen:
            scores = variant.scores(tokens)
        if seen.overflow and not scores.isfinite().all():
            raise NotFinite(
                f"scores are NaN or infinite with weights scaled up to "
                f"activations of {size:.0f}: {seen.place} is divided by its "
                f"sum, and overflows: subtract the largest number first",
                seen.place,
            )


class _Exponentials:
    """Finds exponentials above 1; `shift` subtracts the maximum first."""

    def __init__(self, shift: bool = False):
        self.shift, self.overflow = shift, False
        self.place: Place | None = None

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, and inspect an exponential."""
        if name == "exp" and float(args[0].max()) > 0:  # false for NaN
            self.place = self.place or find_place(name)
            self.overflow |= bool(args[0].exp().isinf().any())
            if self.shift:
                args = (args[0] - args[0].amax(-1, keepdim=True),)
        return func(*args, **kwargs)


def _sizes(subject: Subject) -> Iterator[tuple[Variant, int, int, int]]:
    """Yield copies of the model, with length, row count and count of calls."""
    variant = own(subject)
    back = subject.is_module and subject.builder.can_copy
    longest = subject.block_size
    lengths = [*subject.fit(1, 16), longest, *subject.fit(2, 3)]
    for time in dict.fromkeys(lengths):
        grads = back and time <= GRADIENTS
        large = time * subject.vocab_size >= 1 << 22
        rows = 5 if time <= 16 else 1 if large else 2
        yield variant, time, rows, 1
        if subject.is_program:
            continue
        if grads:
            yield variant.run_as(WITH_GRADIENTS), time, rows, 1
        train = TRAIN if grads else TRAIN_WITHOUT_GRADIENTS
        yield variant.run_as(train), time, rows, 4 if 3 < time <= 16 else 1


def _try(
    variant: Variant, tokens: Int[Tensor, "rows time"], seed: int
) -> None:
    """Require finite numbers in a forward and, if there is one, a backward."""
    model, time, mode = variant.model, tokens.size(1), variant.case.mode
    grad = variant.case.grad
    if grad:
        model.zero_grad()
    scores = variant.scores(tokens, seed=seed, grad=grad)
    if (bad := ~torch.isfinite(scores)).any():
        row, position = bad.any(-1).nonzero()[0].tolist()
        raise NotFinite(
            f"{float(bad.double().mean()):.2%} of the scores are NaN or "
            f"infinite at length {time} {mode}, first at position {position} "
            f"of row {row}"
        )
    if not scores.requires_grad:
        return
    with during(f"in the backward pass {mode}, at length {time}"):
        cross_entropy(scores.float(), tokens.roll(1, 0)).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        numbers = None if gradient is None else local(gradient).to_dense()
        if numbers is not None and not numbers.isfinite().all():
            raise AssertionError(
                f"the gradient of {name} is NaN or infinite at length {time} "
                f"{mode}, while the scores are finite"
            )
