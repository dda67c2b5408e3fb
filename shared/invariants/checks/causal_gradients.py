"""No gradient comes from the future."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...running.rounding import is_real
from ...running.tokens import SHORT, SPLITS, draw, rows_at_once, splits_to_try
from ...running.tolerances import FLOOR_UNITS
from ...running.variant import Variant, both, precise
from ...running.ways import TRAIN
from ..check import SkipCheck, Subject, check
from ..embedding import gradients_at


@check(share=1, implied_by=("check_causality",), needs="gradients")
def check_causal_gradients(subject: Subject) -> str:
    """The gradient of output t with respect to later embeddings is 0.

    Why: a custom backward may leak although the forward does not.
    How: in row t of a batch of equal rows, a random combination of position
    t's scores is differentiated. Its gradient with respect to later embeddings
    must be 0 up to rounding. The check runs in eval and train mode, and with
    larger weights.
    If it fails: if check_causality passes, look for a hand-written backward, a
    hook, or a straight-through term.
    Reports: issue triton-lang/triton 4541, a backward without the causal flag.
    """
    longest = subject.block_size
    if longest < 2:
        raise SkipCheck("one token has no future")
    subject.require_gradients()
    subject.require_no_state()
    generator = subject.generator()
    for variant, time in _sizes(subject):
        with subject.budget.part(variant.case.name, time, 1 / 3):
            _require_none_ahead(variant, time, generator)
    return f"lengths 2 to {subject.budget.reached}, eval and train mode"


def _sizes(subject: Subject) -> Iterator[tuple[Variant, int]]:
    """Yield copies of the model with lengths: short ones, then the longest."""
    longest = subject.block_size
    for times in (subject.fit(2, 3, 7, SHORT), [longest]):
        variants = [*both(subject, times[-1])]
        variants.append(precise(subject, times[-1]).run_as(TRAIN))
        for variant in variants:
            yield from ((variant, time) for time in times)


def _require_none_ahead(
    variant: Variant, time: int, generator: torch.Generator
) -> None:
    """Require zero gradients after some positions, one position per row."""
    subject, vocab = variant.subject, variant.subject.vocab_size
    count = SPLITS if time <= SHORT else 8
    positions = [s - 1 for s in splits_to_try(time, generator, count)]
    rows = subject.fit_rows(max(1, rows_at_once(vocab, time) // 4))
    tokens = draw(vocab, 1, time, generator, repeats=False)
    seed = int(torch.randint(1 << 30, (1,), generator=generator))

    def measure(part: list[int], row: int | None = None) -> Tensor:
        weights = torch.Generator().manual_seed(seed)
        grads = gradients_at(variant, tokens, part, weights, row)
        if grads is None:
            raise SkipCheck("no embedding of the tokens can be found")
        return grads

    def entry(part: list[int], row: int, later: int) -> Tensor:
        return measure(part, row)[row, later].reshape(1).double()

    for first in range(0, len(positions), rows):
        part = positions[first : first + rows]
        grads = measure(part).cpu()
        if not torch.isfinite(grads).all():
            raise SkipCheck("gradients are NaN or infinite: see check_finite")
        future = torch.arange(time) > torch.tensor(part).unsqueeze(1)
        if subject.sees is not None:
            future = ~subject.sees.of(tokens)[0][part]
        ahead = grads.masked_fill(~future, 0.0)
        past = float(grads.masked_fill(future, 0.0).max())
        noise = past * torch.finfo(grads.dtype).eps
        size = float(ahead.max())
        if not size > FLOOR_UNITS * noise:
            continue
        row, later = divmod(int(ahead.argmax()), time)
        with subject.budget.overtime():
            found = partial(entry, part, row, later)
            real = is_real(variant.model, found, noise)
        if real:
            forbids, whom = "", "the past"
            if subject.sees is not None:
                forbids = f", which {subject.sees.name} forbids"
                whom = "a token that it sees"
            raise AssertionError(
                f"the scores of position {part[row]} have a gradient by the "
                f"embedding of token {later}{forbids}, at length {time}: "
                f"{size:.2g}, while the largest one from {whom} is {past:.2g}"
                f"{variant.conditions}"
            )
