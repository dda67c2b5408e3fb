"""Find the scores in a model's answers, by calls at two sizes."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelRaised
from ..model.arrays import IN_ARRAYS, is_array
from ..model.calling import SCORERS, Caller, caller_of
from ..model.reading import Reader, describe, find_scores, reach, tensors_in
from ..model.sizes import VOCABULARY, declared
from ..subject import Subject
from ..variant import Copy, Variant

Size = tuple[int, int]  # of batch and time
OTHER_KIND = TypeError, AttributeError  # of a function written in arrays


def probe(subject: Subject, copy: Copy) -> tuple[Subject, Size]:
    """Find how a model is called and its answer read, or the fault of both.

    Targets are added if the model scores fewer positions without them; other
    sizes are tried if the model refuses the first.

    Returns:
        The subject with its caller and reader, or a fault, and a size that
        the model answered.

    Raises:
        ModelRaised: if the model answers at no size.
    """
    vocab = subject.vocab_size
    unread: list[tuple[Caller, Size, Any]] = []
    raised: list[tuple[ModelRaised, Caller]] = []
    for sizes in _sizes(vocab, subject.block_size):
        for caller in _callers(subject.caller, copy.model):
            try:
                answers = [
                    _call(replace(subject, caller=caller), copy, size, vocab)
                    for size in sizes
                ]
            except ModelRaised as error:
                raised.append((error, caller))
                continue
            reader = _find_reader(
                [*zip(answers, sizes, strict=True)],
                vocab,
                declared(copy.model, VOCABULARY) is not None,
                caller.time_first,
            )
            if reader is not None:
                found = replace(subject, caller=caller, reader=reader)
                if caller.arrays or is_array(reach(answers[1], reader.path)):
                    found = replace(found, in_arrays=True).noted(IN_ARRAYS)
                return found, sizes[1]
            unread.append((caller, sizes[1], answers[1]))
    if unread:
        caller, size, answer = unread[0]
        fault = (
            f"the scores for tokens of shape {size} should have shape "
            f"{(*size, vocab)} (batch, time, vocab), got {describe(answer)}"
        )
        if isinstance(answer, Tensor) and answer.numel() == 1:
            fault += (
                f", a loss: give the model a method {SCORERS[0]}(tokens) that "
                f"returns the scores"
            )
        return replace(subject, caller=caller, fault=fault), size
    if not subject.is_module:  # the other kind of ids says more
        raised.sort(key=lambda r: isinstance(r[0].__cause__, OTHER_KIND))
    first, caller = raised[0]
    subject = replace(subject, caller=caller)
    try:
        _call(subject, copy, (1, 1), 1)  # id 0 alone
    except ModelRaised:
        raise first from first.__cause__
    fault = f"of {vocab} ids some are refused: {first}"
    try:
        for size in probe_sizes(vocab, subject.block_size):
            _call(subject, copy, size, 1)
    except ModelRaised as error:  # with id 0 alone, too: it is the length
        fault = f"one token is answered, but {error}"
    return replace(subject, fault=fault), (1, 1)


def _call(subject: Subject, copy: Copy, size: Size, top: int) -> Any:
    """Call a model in eval mode on ids below top, top - 1 among them."""
    tokens = torch.randint(top, size, generator=subject.generator())
    tokens[-1, -1] = top - 1
    variant = Variant(subject, copy)
    try:
        return variant.answer(tokens, seed=subject.seed)
    except ModelRaised:  # the call before may have left it so
        stateful = replace(subject, keeps_state=True)
        variant = replace(variant, subject=stateful)
        return variant.answer(tokens, seed=subject.seed)


def _callers(caller: Caller, model: Any) -> Iterator[Caller]:
    """Yield ways to call a model: as given, then with targets of zeros.

    A function that refuses tensors may be written in arrays, and a module
    whose own call returns a loss alone may have a method for its scores.
    """
    kinds = [caller]
    if not isinstance(model, nn.Module):
        kinds.append(replace(caller, arrays=True))
    yield from kinds
    if caller.method is not None:
        return
    names = [caller.target_name, *caller.optional]
    for name in dict.fromkeys(n for n in names if n is not None):
        if name not in caller.given:
            given = caller.given | {name: torch.zeros_like}
            for kind in kinds:
                yield replace(kind, given=given, target_name=name)
    if isinstance(model, nn.Module) and caller.target_name is not None:
        for name in SCORERS:
            if inspect.ismethod(getattr(model, name, None)):
                yield caller_of(model, name, caller.time_first)


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
    """Return two sizes (batch, time) that differ from the vocabulary."""

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
    """Return a reader of the scores at the same place in both answers."""
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
