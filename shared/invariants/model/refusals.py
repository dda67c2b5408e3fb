"""What a model refuses, and how it takes what it is given: found by trying.

Told once, by check_shape or as a note: no other check stumbles over it.
"""

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ..errors import ModelRaised, UnusableModel
from .building import Model
from .randomness import RecordedDraws
from .sizes import ROWS, before_first_position, declared
from .tokens import SHORT, draw

if TYPE_CHECKING:
    from .subject import Subject

NEVER = -9e3  # a score below this everywhere leaves no probability
# a model that accepts these lengths and the longest takes all
FEW = (1, 2, 3, 7)
MANY_ROWS = 64  # as many as the checks give at once, but for a few


@dataclass(frozen=True)
class Lengths:
    """Multiples of a step, from the least to the longest."""

    least: int
    step: int
    longest: int

    def accepts(self, time: int) -> bool:
        """Whether a length is one of them."""
        inside = self.least <= time <= self.longest
        return inside and time % self.step == 0

    def fit(self, time: int) -> int:
        """Return the longest that is no longer, else the least."""
        time = min(time, self.longest)
        return max(time - time % self.step, self.least)

    def __str__(self) -> str:
        if self.step == 1:
            return f"lengths from {self.least} to {self.longest}"
        return f"multiples of {self.step} from {self.least} to {self.longest}"


def find_lengths(
    accepts: Callable[[int], bool], longest: int, known: int
) -> Lengths:
    """Return the lengths that a model accepts, as far as some of them show.

    One is known; none over the longest is tried.
    """
    accepts = cache(accepts)
    if all(accepts(t) for t in (*FEW, longest) if t <= longest):
        return Lengths(1, 1, longest)
    powers = [1 << k for k in range(5, longest.bit_length())]
    for some in (range(1, min(SHORT, longest) + 1), powers, [known]):
        taken = [t for t in some if accepts(t)]
        if taken:
            break
    step = min((b - a for a, b in pairwise(taken)), default=taken[0])
    least = low = taken[-1] - taken[-1] % step
    while least > step and accepts(least - step):
        least -= step
    end = longest - longest % step
    if accepts(end):
        return Lengths(least, step, end)
    longer = range(low + step, end, step)
    count = bisect(longer, False, key=lambda t: not accepts(t))
    return Lengths(least, step, low + count * step)


def require_batch_first(
    subject: "Subject", model: Model, batch: int, time: int
) -> None:
    """Refuse a model that takes (time, batch) where nothing says so.

    It shows when a token moves what comes after it in the first axis and
    not in the second, along which equal tokens have equal scores.
    """
    if subject.caller.time_first or time < 2:
        return
    vocab = subject.vocab_size
    tokens = subject.draw(batch, time)
    change = torch.zeros_like(tokens)
    change[0, 0] = 1
    base, moved, equal = (
        subject.scores(model, ids, seed=subject.seed)
        for ids in (tokens, (tokens + change) % vocab, change * 0)
    )
    differs = (base != moved).any(-1)
    if (
        differs[1:, 0].any()
        and not differs[0, 1:].any()
        and torch.allclose(equal, equal[:, :1].expand_as(equal))
    ):
        raise UnusableModel(
            f"{subject.name} mixes the first axis of its tokens and not the "
            f'second: does it take (time, batch)? Then give layout="tb" '
            f"(in the shell --layout tb)"
        )


def find_refusals(
    subject: "Subject", model: Model, batch: int, time: int
) -> None:
    """Find lengths and numbers of rows that are refused."""
    refused: dict[tuple[int, int], ModelRaised] = {}

    def answers(rows: int, length: int) -> bool:
        ids = draw(subject.vocab_size, rows, length, subject.generator())
        try:
            subject.scores(model, ids)
        except ModelRaised as error:
            refused[rows, length] = error
        return (rows, length) not in refused

    rows, longest = 1 if answers(1, time) else batch, subject.block_size
    refused.clear()
    subject.lengths = find_lengths(
        lambda length: answers(rows, length), longest, time
    )
    fewer = longest - before_first_position(model, longest)
    if refused and subject.lengths != Lengths(1, 1, fewer):
        first = refused[min(refused)]
        subject.refusals.append((first, f"{subject.lengths} are answered"))
    subject.block_size = subject.lengths.longest
    refused.clear()
    length = subject.lengths.fit(7)
    if answers(MANY_ROWS, length):
        return
    more = range(batch + 1, MANY_ROWS)
    count = bisect(more, False, key=lambda rows: not answers(rows, length))
    subject.rows = batch + count
    said = declared(model, ROWS)
    if said is not None and said.value == subject.rows:
        subject.notes.append(f"at most {said.value} rows at once: {said}")
    else:
        first = refused[min(refused)]
        subject.refusals.append((first, f"{subject.rows} rows are answered"))


def find_state(
    subject: "Subject", model: Model, batch: int, time: int
) -> None:
    """Find out whether a call shows in the next one, and can be undone."""
    tokens, between = subject.draw(2 * batch, time).split(batch)

    def differs() -> bool:
        try:
            subject.scores(model, between)
            scores = subject.scores(model, tokens, seed=subject.seed)
        except ModelRaised:
            return True
        return not torch.allclose(scores, first, 0, noise, True)

    subject.start_again(model)
    first = subject.scores(model, tokens, seed=subject.seed)
    largest = float(first.abs().nan_to_num_(posinf=0.0).max())
    noise = 64 * torch.finfo(first.dtype).eps * largest
    subject.keeps_state = differs()
    if not subject.keeps_state:
        return
    if differs():
        subject.lost_state = (
            "what a call leaves for the next one cannot be undone: see "
            "check_determinism"
        )
        return
    with RecordedDraws() as draws:
        subject.scores(model, tokens)
    subject.noisy = bool(draws.shapes)  # by a generator that is kept
    subject.notes.append(
        "a call shows in the scores of the next one, which is the matter of "
        "check_determinism: all other checks start each call from the state "
        "that the model was built in"
    )


def find_noise(subject: "Subject", model: Model, batch: int) -> None:
    """Find ids without a score, and whether random numbers are drawn."""
    tokens = subject.draw(batch, 7)
    first, again = (subject.scores(model, tokens, seed=1) for _ in "ab")
    other = subject.scores(model, tokens, seed=2)
    hidden = (first < NEVER).flatten(0, 1).all(0)
    if hidden.any() and not hidden.all():
        subject.hidden = hidden.nonzero().flatten().tolist()
        subject.notes.append(
            f"the scores of {len(subject.hidden)} ids are minus infinity, or "
            f"as good as, at every position ({subject.hidden[0]} is the "
            f"first): they are left out"
        )
    if first.equal(again) and not first.equal(other):
        subject.noisy = True
        subject.notes.append(
            "random numbers are drawn in eval mode, which is the matter of "
            "check_determinism: all other checks run the model from a fixed "
            "random state"
        )
