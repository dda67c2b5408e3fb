"""Reject models with wrong shapes or a leak, and wrongly compiled ones."""

from typing import Any

import torch
from torch import Tensor

from gpt_duet.agreement import largest_difference
from gpt_duet.timing import clock_for

from .candidates import Candidate


def answer(
    candidate: Candidate, tokens: Tensor, *, grad: bool = False
) -> tuple[Any, float]:
    """Run a candidate once; return the scores and the seconds it took.

    Raises:
        ValueError: in one line, if the candidate cannot be run or compiled.
    """
    clock = clock_for(tokens.device)
    start = clock()
    try:
        with torch.inference_mode(not grad):
            return candidate.scores(tokens), clock() - start
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{candidate.name} cannot be run: {words}") from None


def require_sound(
    candidate: Candidate, tokens: Tensor, vocab_size: int
) -> float:
    """Raise ValueError for a wrong shape, or if the model sees the future.

    First, the second half of the text is changed, because a 16-bit dtype may
    round away the effect of a single token. Then only the last token is
    changed, to find a model that looks ahead only at the end of the text.

    Returns:
        The seconds of the first run.
    """
    name = candidate.name
    scores, seconds = answer(candidate, tokens)
    expected = (*tokens.shape, vocab_size)
    found = tuple(getattr(scores, "shape", ()))
    if found != expected:
        shown = found or type(scores).__name__
        raise ValueError(f"{name} answers {shown}; expected {expected}")
    if tokens.size(1) < 2:
        return seconds
    row = tokens[:1]  # one row is faster, and also shows a leak
    once, again = (answer(candidate, row)[0] for _ in range(2))
    tolerance = _rounding(once, again)
    for first in sorted({row.size(1) // 2, row.size(1) - 1}):
        changed = row.clone()
        changed[:, first:] = (changed[:, first:] + 1) % vocab_size
        moved, _ = answer(candidate, changed)
        leak = largest_difference(moved[:, :first], once[:, :first])
        if not leak <= tolerance:
            raise ValueError(
                f"{name} sees the future: tokens from {first} on change "
                f"earlier scores by {leak:.2g} (rounding {tolerance:.2g}); it "
                "is not timed"
            )
    return seconds


def _rounding(once: Tensor, again: Tensor) -> float:
    """Return how far rounding may move the scores of equal tokens.

    Two runs of one shape usually round in the same way, even in 16 bits, so
    the bound of float32 is enough. On an accelerator the order of sums may
    vary, so the difference of two runs is added, up to the dtype's own bound.
    """
    spread = once.float().std().item()
    least, most = (
        16 * torch.finfo(dtype).eps * spread
        for dtype in (torch.float32, once.dtype)
    )
    return least + min(largest_difference(again, once), most)


def require_as_eager(
    compiled: Candidate, eager: Candidate, tokens: Tensor, grad: bool = False
) -> float:
    """Check that compiling keeps scores; return the first run's seconds."""
    found, seconds = answer(compiled, tokens, grad=grad)
    expected, _ = answer(eager, tokens, grad=grad)
    difference = largest_difference(found, expected)
    spread = expected.float().std().item()
    # allow for much rounding, because compiling changes the order of sums
    tolerance = 4 * torch.finfo(expected.dtype).eps ** 0.5 * spread
    if not difference <= tolerance:
        words = f"{compiled.name} differs from the eager model by "
        far = f"{difference:.2g} (bound {tolerance:.2g})"
        raise ValueError(f"{words}{far}; it is not timed")
    return seconds
