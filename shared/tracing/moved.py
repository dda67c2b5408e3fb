"""One loop for maps, leaks and contexts: change tokens, see who moves."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..running.rounding import floor, gaps
from ..running.tokens import others
from ..running.variant import Variant


class Moved(NamedTuple):
    """How far the scores of some rows have moved."""

    rows: list[int]  # of the texts; a row may stand there twice
    by: Float[Tensor, "rows time"]  # at each position that is compared
    base: Float[Tensor, "rows time vocab"]  # the scores before
    least: float  # the size up to which this is rounding


def moves(
    variant: Variant,
    base: Int[Tensor, "rows time"],
    changed: Int[Tensor, "rows time"],
    at: slice = slice(None),
) -> Iterator[Moved]:
    """Yield how far scores move from texts to changed ones, batch by batch.

    Only calls of equal shape round alike: the last batch is filled up with
    its last row. Equal texts go through the model once. At selects the
    positions whose scores are compared.
    """
    count, time = base.shape
    at_once = min(count, variant.rows_at_once(time))
    same = bool((base == base[0]).all())
    scores = None
    for first in range(0, count, at_once):
        rows = [min(first + i, count - 1) for i in range(at_once)]
        if scores is None or not same:
            scores = variant.scores(base[rows])[:, at]
        by = gaps(variant.scores(changed[rows])[:, at], scores).cpu()
        yield Moved(rows, by, scores, floor(scores))


def influence_of(
    variant: Variant,
    ids: Int[Tensor, "time"],
    rounds: int = 2,
    show: Callable[[str], None] = lambda words: None,
) -> Float[Tensor, "time time"]:
    """Return how far each token of a text moves each output position.

    Entry [i, j] is the largest change of the scores of position i when only
    token j is replaced.

    Args:
        variant: the model, as it is called.
        ids: the text.
        rounds: how many replacements of each token are tried.
        show: called with how far it is.
    """
    vocab, time = variant.subject.vocab_size, ids.numel()
    generator = variant.subject.generator()
    matrix = torch.zeros(time, time, dtype=torch.float64)
    base = ids.repeat(time, 1)
    for index in range(rounds):
        replaced = base.clone()
        replaced.diagonal().copy_(others(ids, vocab, generator))
        for moved in moves(variant, base, replaced):
            done = index * time + moved.rows[-1] + 1
            show(f"influence: {done} of {rounds * time} replaced tokens")
            for token, by in zip(moved.rows, moved.by.double(), strict=True):
                matrix[:, token] = torch.maximum(matrix[:, token], by)
    return matrix
