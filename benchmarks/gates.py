"""Models that are not timed: another shape, a leak, a wrong compilation."""

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

    ValueError in one line for one that cannot be run or compiled.
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
    """Refuse what answers another shape, or looks into the future.

    Half of the text is changed, where one token among many would be lost in
    the rounding of a short format, and the last token alone, for a model
    that looks ahead only within its last part. Returns the seconds of the
    first of all runs.
    """
    name = candidate.name
    scores, seconds = answer(candidate, tokens)
    expected = (*tokens.shape, vocab_size)
    found = tuple(getattr(scores, "shape", ()))
    if found != expected:
        shown = found or type(scores).__name__
        raise ValueError(f"{name} answers {shown}; {expected} is required")
    if tokens.size(1) < 2:
        return seconds
    row = tokens[:1]  # one row leaks as all do, and is quick
    once, again = (answer(candidate, row)[0] for _ in range(2))
    tolerance = _rounding(once, again)
    for first in sorted({row.size(1) // 2, row.size(1) - 1}):
        changed = row.clone()
        changed[:, first:] = (changed[:, first:] + 1) % vocab_size
        moved, _ = answer(candidate, changed)
        leak = largest_difference(moved[:, :first], once[:, :first])
        if not leak <= tolerance:
            raise ValueError(
                f"{name} sees the future: tokens from {first} on move earlier "
                f"scores by {leak:.2g} (rounding {tolerance:.2g}); it is not "
                "timed"
            )
    return seconds


def _rounding(once: Tensor, again: Tensor) -> float:
    """Return how far rounding may move the scores of the same tokens.

    Sums of the same numbers in the same shapes are rounded alike in any
    format: float32's bound is enough. Where an accelerator's order of sums
    varies, that is added, up to what the format explains.
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
    """Refuse what computes something else compiled; return its first time."""
    found, seconds = answer(compiled, tokens, grad=grad)
    expected, _ = answer(eager, tokens, grad=grad)
    difference = largest_difference(found, expected)
    spread = expected.float().std().item()
    # the order of sums changes: some roundings, none of them systematic
    tolerance = 4 * torch.finfo(expected.dtype).eps ** 0.5 * spread
    if not difference <= tolerance:
        words = f"{compiled.name} differs from its eager self by "
        far = f"{difference:.2g} (bound {tolerance:.2g})"
        raise ValueError(f"{words}{far}; it is not timed")
    return seconds
