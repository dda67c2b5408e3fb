"""What a model refuses, and how it takes what it is given: found by trying.

Told once, by check_shape or as a note: no other check stumbles over it.
"""

from typing import TYPE_CHECKING

import torch

from ..errors import ModelRaised, UnusableModel
from .building import Model
from .lengths import Lengths, find_lengths
from .randomness import RecordedDraws
from .sizes import ROWS, before_first_position, declared
from .tokens import draw

if TYPE_CHECKING:
    from .subject import Subject

NEVER = -9e3  # a score below this everywhere leaves no probability
MANY_ROWS = 64  # as many as the checks give at once, but for a few


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
    low, high, length = batch, MANY_ROWS + 1, subject.lengths.fit(7)
    if answers(MANY_ROWS, length):
        return
    while high - low > 1:
        middle = (low + high) // 2
        good = answers(middle, length)
        low, high = (middle, high) if good else (low, middle)
    subject.rows = low
    said = declared(model, ROWS)
    if said is not None and said.value == low:
        subject.notes.append(f"at most {low} rows at once: {said}")
    else:
        first = refused[min(refused)]
        subject.refusals.append((first, f"{low} rows are answered"))


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
