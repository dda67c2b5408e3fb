"""Log-probabilities."""

import math

import torch
from torch import Tensor

from ...running.rounding import floor_of, is_real, rounding
from ...running.tolerances import FLOOR_UNITS
from ...running.variant import Variant, both
from ...validation import dtype_name
from ..check import SkipCheck, Subject, check

NORMALISED = 1e-3  # sums as close to 1 as that are meant to be 1


@check()
def check_normalised(subject: Subject) -> str:
    """Log-probabilities sum to 1, where the model says it returns them.

    Why: a sum of 0.99 is a loss that is 0.01 too high or too low.
    How: the logarithm of the sum of exponentials is 0 to rounding, on the
    fresh model and with larger weights, in float64 where the model can.
    Reports: a softmax in front of nn.CrossEntropyLoss, which takes logits.
    """
    subject.require_no_state()
    worst = max(map(_require_sums, both(subject)))
    return f"sums are 1 to {worst:.1g}"


def _require_sums(variant: Variant) -> float:
    """Return how far logarithms of sums are from 0; raise where too far."""
    subject = variant.subject
    tokens = subject.draw(3, 16)
    scores = variant.scores(tokens)
    ones = torch.ones_like(scores[..., 0], dtype=torch.float64)
    if bool((scores >= 0).all()) and torch.allclose(
        scores.double().sum(-1), ones, atol=1e-4
    ):
        raise AssertionError(
            "the scores are probabilities, not their logarithms: none is "
            "negative, and those of a position sum to 1"
        )

    def sums(scores: Tensor) -> Tensor:
        return scores[..., subject.scored].double().logsumexp(-1)

    off = sums(scores)
    size = float(off.abs().nan_to_num(nan=math.inf).max())
    noise = max(rounding(scores), torch.finfo(scores.dtype).eps)
    # what is nearly normalised was meant to be
    if not subject.says_log_probs and size > NORMALISED:
        raise SkipCheck("logits, which need not be normalised")
    # what is computed in float32 inside keeps float32's rounding
    inner = FLOOR_UNITS * torch.finfo(torch.float32).eps
    if size > floor_of(scores.dtype) * noise and (
        size > inner
        or is_real(variant.model, lambda: sums(variant.scores(tokens)), noise)
    ):
        position = int(off.abs().amax(0).argmax())
        total = float(off[:, position].exp().max())
        raise AssertionError(
            f"the probabilities of position {position} sum to {total:.9g}: "
            f"in logarithms {size:.2g} from 0 ({dtype_name(scores.dtype)}"
            f"{variant.conditions})"
        )
    return size
