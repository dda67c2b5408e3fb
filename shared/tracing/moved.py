"""Change tokens and compare scores, for maps, leaks and use of context."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..running.rounding import floor, gaps
from ..running.tokens import others
from ..running.variant import Variant


class Moved(NamedTuple):
    """How far changed tokens have moved the scores of some rows."""

    rows: list[int]  # rows of the texts; a row may occur twice
    by: Float[Tensor, "rows time"]  # distances at compared positions
    base: Float[Tensor, "rows time vocab"]  # the scores before the change
    least: float  # the size up to which a distance is rounding


def moves(
    variant: Variant,
    base: Int[Tensor, "rows time"],
    changed: Int[Tensor, "rows time"],
    at: slice = slice(None),
) -> Iterator[Moved]:
    """Yield the distances of scores between texts and changed texts.

    Only calls of equal shape round equally, so the last batch is filled with
    copies of its last row. If all texts of `base` are equal, only the first
    batch of them runs. `at` selects the positions whose scores are compared.
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
    """Return how far each token of a text moves the scores at each position.

    Entry [i, j] is the largest change of the scores of position i when only
    token j is replaced.

    Args:
        variant: the model, bound to a case.
        ids: the text.
        rounds: how many replacements of each token are tried.
        show: a function that gets the progress, in words.
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
