"""Where a model's scores are: found out by calling it at two sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ModelRaised
from .calling import Caller
from .reading import Reader, describe, find_scores, follow, tensors_in

Ask = Callable[[Caller, int, int, int], Any]
Answers = list[tuple[Any, int, int]]


@dataclass(frozen=True)
class Probed:
    """How a model is called and read, or why it cannot be.

    Attributes:
        caller: calls it.
        reader: reads its answers; None: they hold no scores.
        size: of batch and time that it answered.
        fault: what is wrong with the answers' shape.
    """

    caller: Caller
    reader: Reader | None
    size: tuple[int, int]
    fault: str = ""


def probe(
    ask: Ask, caller: Caller, vocab: int, block: int, padded: bool
) -> Probed:
    """Return how a model is called, and how its answers are read.

    Targets are added where it answers for fewer positions without them; and
    other sizes are tried where it refuses the first.

    Args:
        ask: returns its answer to ids below a number, of a size of batch and
            time.
        caller: as the signature says.
        vocab: number of tokens.
        block: longest sequence.
        padded: whether there may be scores of ids beyond the vocabulary.

    Raises:
        ModelRaised: where it answers at no size.
    """
    answered: Probed | None = None
    raised: ModelRaised | None = None
    for sizes in _sizes(vocab, block):
        for call in _callers(caller):
            try:
                answers = [(ask(call, b, t, vocab), b, t) for b, t in sizes]
            except ModelRaised as error:
                raised = raised or error
                continue
            batch, time = sizes[1]
            reader = _find_reader(answers, vocab, padded, call.time_first)
            if reader is not None:
                return Probed(call, reader, (batch, time))
            fault = (
                f"the scores for tokens of shape {(batch, time)} should have "
                f"shape {(batch, time, vocab)} (batch, time, vocab), got "
                f"{describe(answers[1][0])}"
            )
            answered = answered or Probed(call, None, (batch, time), fault)
    if answered is None:
        assert raised is not None
        answered = _overflow(ask, caller, vocab, min(2, block), raised)
    return answered


def _callers(caller: Caller) -> Iterator[Caller]:
    """Yield ways to call a model: as it is, then with targets of zeros."""
    yield caller
    if caller.method is not None:
        return
    names = [caller.target_name, *caller.optional]
    for name in dict.fromkeys(n for n in names if n is not None):
        if name not in caller.given:
            yield replace(
                caller,
                given=caller.given | {name: torch.zeros_like},
                target_name=name,
            )


def _overflow(
    ask: Ask, caller: Caller, vocab: int, time: int, raised: ModelRaised
) -> Probed:
    """Return which id is the first to raise, or raise where all do."""
    low, high = 0, vocab
    while high - low > 1:
        middle = (low + high) // 2 if low else 1
        try:
            ask(caller, 1, time, middle)
            low = middle
        except ModelRaised as error:
            if not low:
                raise raised from error.__cause__
            high, raised = middle, error
    fault = f"id {low} of {vocab} is refused: {raised}"
    return Probed(caller, None, (1, time), fault)


def _sizes(vocab: int, block: int) -> Iterator[list[tuple[int, int]]]:
    """Yield pairs of sizes of batch and time to find the scores at."""
    yield probe_sizes(vocab, block)
    yield [(1, t) for _, t in probe_sizes(vocab, block)]
    for step in (8, 32, 64, 256, block):
        if step <= block:
            last = min(2 * step, block - block % step)
            yield [(3, step), (2, last)]
            yield [(1, step), (1, last)]


def probe_sizes(vocab: int, block: int) -> list[tuple[int, int]]:
    """Return two sizes of batch and time, told apart from the vocabulary."""

    def shared(batch: int, time: int) -> int:
        sizes = [batch, time, vocab, batch * time, 1]
        return len(sizes) - len(set(sizes))

    sizes = [(b, t) for t in range(min(7, block), 0, -1) for b in (3, 2, 5)]
    sizes.sort(key=lambda size: shared(*size))  # stable: longest first
    first = sizes[0]
    others = [s for s in sizes if s[0] != first[0] and s[1] != first[1]]
    return [first, (others or sizes[1:])[0]]


def _find_reader(
    answers: Answers, vocab: int, padded: bool, time_first: bool
) -> Reader | None:
    """Return a reader of what is at the same place in both answers."""
    if time_first:
        answers = [(answer, time, batch) for answer, batch, time in answers]
    answer, batch, time = answers[-1]
    widths = [vocab]
    if padded:
        widths += [
            tensor.size(2)
            for _, tensor in tensors_in(answer)
            if tensor.ndim == 3 and tensor.shape[:2] == (batch, time)
        ][:1]
    for width in widths:
        first, second = (find_scores(*answer, width) for answer in answers)
        for path, form in first:
            if (path, form) in second and width >= vocab:
                dtype = follow(answer, path).dtype
                return Reader(path, form, dtype, width, vocab)
    return None
