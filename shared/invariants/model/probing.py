"""Where a model's scores are: found out by calling it at two sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ModelRaised
from .calling import Caller
from .reading import Reader, describe, find_scores, tensors_in

Size = tuple[int, int]  # of batch and time


@dataclass(frozen=True)
class Probed:
    """How a model is called and read, or what is wrong with its answers.

    Attributes:
        size: of batch and time that it answered.
    """

    caller: Caller
    reader: Reader | None
    size: Size
    fault: str = ""


def probe(
    ask: Callable[[Caller, int, int, int], Any],
    caller: Caller,
    vocab: int,
    block: int,
    padded: bool,
) -> Probed:
    """Return how a model is called, and how its answers are read.

    Targets are added where it answers for fewer positions without them; and
    other sizes are tried where it refuses the first. Ask returns its answer
    to ids below a number, of a size of batch and time; padded says whether
    there may be scores of ids beyond the vocabulary.

    Raises:
        ModelRaised: where it answers at no size.
    """
    unread: list[Probed] = []
    raised: list[ModelRaised] = []
    for sizes in _sizes(vocab, block):
        for call in _callers(caller):
            try:
                answers = [ask(call, *size, vocab) for size in sizes]
            except ModelRaised as error:
                raised.append(error)
                continue
            reader = _find_reader(
                [*zip(answers, sizes, strict=True)],
                vocab,
                padded,
                call.time_first,
            )
            if reader is not None:
                return Probed(call, reader, sizes[1])
            fault = (
                f"the scores for tokens of shape {sizes[1]} should have shape "
                f"{(*sizes[1], vocab)} (batch, time, vocab), got "
                f"{describe(answers[1])}"
            )
            unread.append(Probed(call, None, sizes[1], fault))
    if unread:
        return unread[0]
    try:
        ask(caller, 1, 1, 1)  # id 0 alone
    except ModelRaised:
        raise raised[0] from raised[0].__cause__
    fault = f"of {vocab} ids some are refused: {raised[0]}"
    return Probed(caller, None, (1, 1), fault)


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


def _sizes(vocab: int, block: int) -> Iterator[list[Size]]:
    """Yield pairs of sizes to find the scores at."""
    pair = probe_sizes(vocab, block)
    yield pair
    yield [(1, time) for _, time in pair]
    for step in (8, 32, 64, 256, block):
        if step <= block:
            last = min(2 * step, block - block % step)
            yield [(3, step), (2, last)]
            yield [(1, step), (1, last)]


def probe_sizes(vocab: int, block: int) -> list[Size]:
    """Return two sizes of batch and time, told apart from the vocabulary."""

    def shared(size: Size) -> int:
        numbers = [*size, vocab, size[0] * size[1], 1]
        return len(numbers) - len(set(numbers))

    sizes = [(b, t) for t in range(min(7, block), 0, -1) for b in (3, 2, 5)]
    sizes.sort(key=shared)  # stable: longest first
    first = sizes[0]
    others = [s for s in sizes if s[0] != first[0] and s[1] != first[1]]
    return [first, (others or sizes[1:])[0]]


def _find_reader(
    answers: list[tuple[Any, Size]], vocab: int, padded: bool, time_first: bool
) -> Reader | None:
    """Return a reader of what is at the same place in both answers."""
    if time_first:
        answers = [(answer, size[::-1]) for answer, size in answers]
    last, size = answers[-1]
    widths = [vocab]
    if padded:
        widths += [
            tensor.size(2)
            for _, tensor in tensors_in(last)
            if tensor.ndim == 3 and tensor.shape[:2] == size
        ][:1]
    for width in widths:
        places = [
            find_scores(answer, *size, width) for answer, size in answers
        ]
        both = [place for place in places[0] if place in places[1]]
        if both and width >= vocab:
            path, form = both[0]
            alike = sum(other == form for _, other in both)
            return Reader(path, form, width, vocab, alike)
    return None
