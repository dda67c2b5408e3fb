"""Log-probabilities sum to 1."""

import math

import torch
from torch import Tensor

from ...running.rounding import floor_of, is_real, rounding
from ...running.tolerances import FLOOR_UNITS
from ...running.variant import Variant, both
from ...validation import dtype_name
from ..check import SkipCheck, Subject, check

NORMALISED = 1e-3  # sums of probabilities this close to 1 are meant to be 1


@check()
def check_normalised(subject: Subject) -> str:
    """Log-probabilities sum to 1, if the model declares that it returns them.

    Why: with a sum of 0.99 the loss is wrong by 0.01.
    How: the logarithm of the sum of exponentials must be 0 up to rounding, on
    the fresh model and with larger weights, in float64 if the model can.
    If it fails: the model returned probabilities, or scores that were
    normalised over another axis. Return logits, or their log-softmax over the
    vocabulary.
    Reports: a softmax before nn.CrossEntropyLoss, which takes logits.
    """
    subject.require_no_state()
    worst = max(map(_require_sums, both(subject)))
    return f"sums are 1 to {worst:.1g}"


def _require_sums(variant: Variant) -> float:
    """Return the largest absolute logsumexp of scores; raise if not near 0."""
    subject = variant.subject
    tokens = subject.draw(3, 16)
    scores = variant.scores(tokens)
    ones = torch.ones_like(scores[..., 0], dtype=torch.float64)
    if bool((scores >= 0).all()) and torch.allclose(
        scores.double().sum(-1), ones, atol=1e-4
    ):
        raise AssertionError(
            "the scores are probabilities, not their logarithms: no score is "
            "negative, and the scores of a position sum to 1"
        )

    def sums(scores: Tensor) -> Tensor:
        return scores[..., subject.scored].double().logsumexp(-1)

    off = sums(scores)
    size = float(off.abs().nan_to_num(nan=math.inf).max())
    noise = max(rounding(scores), torch.finfo(scores.dtype).eps)
    # nearly normalised scores are meant to be normalised
    if not subject.says_log_probs and size > NORMALISED:
        raise SkipCheck("logits, which need not be normalised")
    # allow for the rounding of float32, in which a model may compute inside
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
