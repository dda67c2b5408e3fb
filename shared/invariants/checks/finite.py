"""Numbers that are none."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..check import Budget, Round, Subject, check
from ..copies import own
from ..errors import NotFinite, during
from ..losses import cross_entropy
from ..variant import Variant
from ..ways import EVAL, TRAIN, TRAIN_WITHOUT_GRADIENTS, WITH_GRADIENTS

GRADIENTS = 256  # tokens: a backward pass of longer texts takes much memory


@check(calls=40, rows=6, copies=10, share=1)
def check_finite(subject: Subject, budget: Budget) -> str:
    """Neither scores nor gradients are ever NaN or infinite.

    Why: one NaN, after one step of an optimiser, is in every weight.
    How: random ids, id 0 first, all ids equal; one token and up to the
    longest; eval mode and, with several dropout masks, train mode.
    Reports: dropout on masked scores turns -inf into NaN in one of ten
    passes in train mode ("GPT from Scratch", listing 5).
    """
    generator = subject.generator()
    for round, _ in budget.affordable(_rounds(subject, budget)):
        tokens = _texts(subject, round.time, generator)[: round.rows]
        for seed in range(round.calls):
            _try(round.variant, tokens, seed, round.grad)
    return f"lengths 1 to {subject.block_size}, eval and train mode"


def _rounds(subject: Subject, budget: Budget) -> Iterator[Round]:
    """Yield lengths and modes; in train mode several dropout masks."""
    variant = own(subject, budget)
    back = subject.is_module and subject.builder.can_copy
    longest = subject.block_size
    lengths = [*subject.fit(1, 16), longest, *subject.fit(2, 3)]
    for time in dict.fromkeys(lengths):
        grads = back and time <= GRADIENTS
        large = time * subject.vocab_size >= 1 << 22
        rows = 5 if time <= 16 else 1 if large else 2
        ways = [(EVAL, False, 1)] + [(WITH_GRADIENTS, True, 1)] * grads
        train = TRAIN if grads else TRAIN_WITHOUT_GRADIENTS
        ways.append((train, grads, 4 if 3 < time <= 16 else 1))
        for way, grad, calls in ways:
            one = variant.run_as(way)
            yield Round(one, time, (), rows, calls, grad=grad, share=1 / 3)


def _texts(
    subject: Subject, time: int, generator: torch.Generator
) -> Int[Tensor, "5 time"]:
    tokens = subject.draw(5, time, generator)
    tokens[1, 0] = 0
    tokens[2], tokens[3] = 0, subject.vocab_size - 1
    tokens[4] = tokens[4, 0].clone()
    return tokens


def _try(
    variant: Variant, tokens: Int[Tensor, "rows time"], seed: int, grad: bool
) -> None:
    """Require numbers of a forward, and with grad of a backward pass."""
    model, time, mode = variant.model, tokens.size(1), variant.way.mode
    if grad:
        model.zero_grad()
    scores = variant.scores(tokens, seed=seed, grad=grad)
    _require_finite(scores.detach(), time, mode)
    if not scores.requires_grad:
        return
    with during(f"in the backward pass {mode}, at length {time}"):
        cross_entropy(scores.float(), tokens.roll(1, 0)).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and not gradient.to_dense().isfinite().all():
            raise AssertionError(
                f"the gradient of {name} is NaN or infinite at length {time} "
                f"{mode}, while the scores are finite"
            )


def _require_finite(
    scores: Float[Tensor, "batch time vocab"], time: int, mode: str
) -> None:
    bad = ~torch.isfinite(scores)
    if bad.any():
        row, position = bad.any(-1).nonzero()[0].tolist()
        raise NotFinite(
            f"{float(bad.double().mean()):.2%} of the scores are NaN or "
            f"infinite at length {time} {mode}, first at position {position} "
            f"of row {row}"
        )
