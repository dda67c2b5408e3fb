"""The query and the key of each score, found by their numbers."""

from collections.abc import Mapping
from itertools import permutations

from torch import Tensor

from .layouts import as_table, largest
from .side import Side

DEEP = 3  # steps back from scores: by a scaled query to the query
NEAR = 1e-5  # of the largest score: scores of two in one place

Factors = tuple[Tensor, Tensor, float, int]  # query, key, c, heads


def find_factors(
    side: Side, scores: Mapping[int, Tensor]
) -> dict[int, Factors]:
    """Return for scores, by their number, what they are the products of.

    Scores are c times the query by the key, both (time, heads * width). Those
    are left out that no two values on the way to them give: with a bias added.
    """
    near = {}
    for number in scores:
        ring, near[number] = {number}, set[int]()
        for _ in range(DEEP):
            ring = {n for m in ring for n in side.values[m].inputs}
            near[number] |= ring
    kept = side.keep(set[int]().union(*near.values())) if near else {}
    found = {
        number: _split(value, [kept[n] for n in sorted(near[number])])
        for number, value in scores.items()
    }
    return {number: two for number, two in found.items() if two is not None}


def _split(scores: Tensor, values: list[Tensor]) -> Factors | None:
    """Return the two values whose products are the scores.

    Of several pairs the one with a c nearest to one over the root of the
    width.
    """
    time = scores.size(-1)
    scores = scores[0] if scores.dim() == 4 else scores
    scores = scores.reshape(-1, time, time)
    heads = len(scores)
    tables = [as_table(value, time)[0] for value in values]
    tables = [t for t in tables if len(t) == time and t.size(1) % heads == 0]
    found: list[tuple[float, Factors]] = []
    for pair in permutations(tables, 2):
        query, key = (t.reshape(time, heads, -1).movedim(1, 0) for t in pair)
        if query.shape != key.shape:
            continue
        products = query @ key.mT
        c = float((scores * products).sum() / products.square().sum())
        if largest(c * products - scores) <= NEAR * largest(scores):
            off = abs(c**2 * query.size(-1) - 1)
            found.append((off, (*pair, c, heads)))
    return min(found, key=lambda each: each[0], default=(0, None))[1]
