"""Where a model's scores are: found out by calling it twice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import UnusableModel
from .calling import Caller
from .reading import Reader, describe, find_scores, follow, tensors_in

Answers = list[tuple[Any, int, int]]


def probe(
    ask: Callable[[Caller, int, int], Any],
    caller: Caller,
    vocab: int,
    block: int,
    padded: bool,
) -> tuple[Caller, Reader]:
    """Return how a model is called, and how its answers are read.

    Targets are added where it answers for fewer positions without them.

    Args:
        ask: returns its answer to ids of a size of batch and time.
        caller: as the signature says.
        vocab: number of tokens.
        block: longest sequence.
        padded: whether there may be scores of ids beyond the vocabulary.

    Raises:
        UnusableModel: for answers without scores.
    """
    callers = [caller]
    if caller.target_name and caller.method is None:
        callers.append(replace(caller, with_targets=True))
    answers: Answers = []
    for caller in callers:
        sizes = probe_sizes(vocab, block)
        answers = [(ask(caller, b, t), b, t) for b, t in sizes]
        reader = _find_reader(answers, vocab, padded)
        if reader is not None:
            return caller, reader
    answer, batch, time = answers[-1]
    raise UnusableModel(
        f"the scores for tokens of shape {(batch, time)} should have shape "
        f"{(batch, time, vocab)} (batch, time, vocab), got {describe(answer)}"
    )


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


def _find_reader(answers: Answers, vocab: int, padded: bool) -> Reader | None:
    """Return a reader of what is at the same place in both answers."""
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
