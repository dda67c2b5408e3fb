"""Pack matrices of numbers so that they fit inside a page.

A value of a forward pass takes one byte per number. Byte 128 is zero, byte 1
is the most negative number, byte 255 the largest positive one, and byte 0 a
masked score. The first numbers of each position follow, in float32. An
influence map says how far each token moves each prediction. Each of its
numbers takes one byte, for its size: from 1e-20 to 1e5, in steps of a tenth of
a decade. Everything is in base64, row by row.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...tracing.influencing import influence
from ..values.layouts import as_table, largest, nearest_layout
from ..values.side import Side

COLUMNS = 128  # columns of a map; wider values show evenly spaced features
NUMBERS = 6  # numbers of each position that a reader can look up
# both models' values share one map if they differ by at most this share of
# their size
SAME_MAP_SHARE = 1e-5
SMALLEST, LARGEST = -20.0, 5.0
# Limits of an influence map: multiplications, fewest tokens, most tokens.
EFFORT, SHORTEST, LONGEST = 6e9, 8, 48
DEEP = 3  # most operations between scores and their query, such as a scaling

# query, key, c (the scores are c times query @ key), number of heads
Factors = tuple[Tensor, Tensor, float, int]


class ValueMaps:
    """A collection of small maps of values, for the page's script.

    Equal values of both models share one map. `found` holds the packed maps,
    and `columns` their layout. Methods return the index of a map.

    Args:
        time: number of positions that are shown.
        length: number of positions that were run.
        drawn: most columns of a map.
        read: how many numbers of each position a reader can look up.
    """

    def __init__(
        self,
        time: int,
        length: int,
        drawn: int = COLUMNS,
        read: int = NUMBERS,
    ):
        self.time, self.length = time, length
        self.drawn, self.read = drawn, read
        self.found: list[str] = []
        self.columns: list[tuple[int, ...]] = []

    def numbers(
        self, left: Tensor | None, right: Tensor | None, square: bool = False
    ) -> list[int | None]:
        """Return the index of each side's map; None for a side without value.

        The right value is brought into the layout of the left one, and both
        maps have one scale. A square value (positions by positions) keeps
        only some heads, with all of their entries.
        """
        return self.compare(left, right, square)[0]

    def compare(
        self, left: Tensor | None, right: Tensor | None, square: bool
    ) -> tuple[list[int | None], float | None]:
        """Return the result of `numbers`, and how far the values differ."""
        shown = [value for value in (left, right) if value is not None]
        scale = max(map(largest, shown), default=0.0) or 1.0
        apart = None
        if left is not None and right is not None:
            right, apart = nearest_layout(right, left, SAME_MAP_SHARE * scale)
            if apart <= SAME_MAP_SHARE * scale:
                return [self._add(left, scale, square)] * 2, apart
        numbers = [
            None if value is None else self._add(value, scale, square)
            for value in (left, right)
        ]
        return numbers, apart

    def _add(self, value: Tensor, scale: float, square: bool) -> int:
        """Add a map with the given scale, and return its index."""
        if square:  # show the first row of the batch, and the heads that fit
            one = value[0] if value.dim() == 4 else value
            one = one.reshape(-1, self.length, self.length)
            one = one[: self.drawn // self.time, : self.time, : self.time]
            heads, table = len(one), one.movedim(0, 1).flatten(1)
        else:
            table, heads = as_table(value, self.length)
            table = table[: self.time]
        width = min(self.drawn, table.size(1))
        some = torch.linspace(0, table.size(1) - 1, width).round().long()
        picked = table[:, some]
        level = (picked / scale).clamp(-1, 1).nan_to_num(0.0)
        # byte 0 is a masked score, byte 128 a zero
        code = torch.where(picked == -torch.inf, 0, 128 + level * 127)
        read = width if square else self.read
        numbers = table[:, :read].numpy().astype("<f4")
        data = code.round().to(torch.uint8).numpy().tobytes()
        data += numbers.tobytes()
        return self._keep(data, width, numbers.shape[1], heads, table.size(1))

    def factors(
        self, found: Sequence[Factors | None], one: bool
    ) -> list[tuple[int, int, float] | None]:
        """Add the query and the key of each model's attention scores.

        If `one` is set, both models share one query and one key, which are
        added once.
        """
        kept: list[tuple[int, int, float] | None] = []
        for known in [found[0] or found[1]] if one else found:
            if known is None:
                kept.append(None)
                continue
            query, key, c, heads = known
            kept.append((self._rows(query, heads), self._rows(key, heads), c))
        return 2 * kept if one else kept

    def _rows(self, table: Tensor, heads: int) -> int:
        """Add the entries of a table's first heads, without a map."""
        shown = min(heads, self.drawn // self.time)
        read = table.size(1) // heads * shown
        numbers = table[: self.time, :read].numpy().astype("<f4")
        return self._keep(numbers.tobytes(), 0, read, shown, read)

    def _keep(self, data: bytes, *columns: int) -> int:
        self.found.append(base64.b64encode(data).decode())
        self.columns.append(columns)
        return len(self.found) - 1


def packed(table: Float[Tensor, "rows columns"]) -> str:
    """Return a table's numbers in float32, row by row, in base64."""
    numbers = table.contiguous().numpy().astype("<f4")
    return base64.b64encode(numbers.tobytes()).decode()


def sizes(matrix: Float[Tensor, "*shape"]) -> str:
    """Return |matrix| as bytes in base64; 255 means NaN or out of range."""
    size = matrix.detach().cpu().double().abs().nan_to_num(nan=math.inf)
    scale = 254 / (LARGEST - SMALLEST)
    level = 1 + (size.clamp(min=1e-300).log10() - SMALLEST) * scale
    code = torch.where(size == 0, 0.0, level.round().clamp(1, 255))
    return base64.b64encode(code.to(torch.uint8).numpy().tobytes()).decode()


def influence_data(
    models: tuple[Any, Any], tokens: Int[Tensor, "1 time"]
) -> dict:
    """Return the influence maps of two models, and their largest leaks.

    For a larger model, fewer tokens of the text are used.
    """
    count = sum(p.numel() for p in models[0].parameters())
    side = max(SHORTEST, min(LONGEST, math.isqrt(int(EFFORT) // count)))
    ids = tokens[0, :side]
    return influence_maps([influence(m, ids, rounds=1) for m in models])


def influence_maps(maps: Sequence[Float[Tensor, "time time"]]) -> dict:
    """Return two influence maps in the form that the page's script reads."""
    return {
        "time": len(maps[0]),
        "left": sizes(maps[0]),
        "right": sizes(maps[1]),
        "early": [m.triu(1).max().item() for m in maps],
        "largest": [m.max().item() for m in maps],
    }


def find_factors(
    side: Side, scores: Mapping[int, Tensor]
) -> dict[int, Factors]:
    """Return the query and key of attention scores, by the scores' numbers.

    Scores are c times the product of query and key, which are returned as
    tables of shape (time, heads * width). Scores that are not the product of
    two earlier values, such as scores with a bias, are left out.
    """
    pairs, kept = find_operands(side, scores)
    found = {
        number: multiplied(scores[number], kept[query], kept[key])
        for number, (query, key) in pairs.items()
    }
    return {number: two for number, two in found.items() if two is not None}


def find_operands(
    side: Side, scores: Mapping[int, Tensor]
) -> tuple[dict[int, tuple[int, int]], dict[int, Tensor]]:
    """Return each score's query and key by number, and the values tried."""
    near = {}
    for number in scores:
        ring, near[number] = {number}, set[int]()
        for _ in range(DEEP):
            ring = {n for m in ring for n in side.values[m].inputs}
            near[number] |= ring
    kept = side.keep(set[int]().union(*near.values())) if near else {}
    found = {
        number: _split(value, {n: kept[n] for n in sorted(near[number])})
        for number, value in scores.items()
    }
    return {n: two for n, two in found.items() if two is not None}, kept


def _split(
    scores: Tensor, values: Mapping[int, Tensor]
) -> tuple[int, int] | None:
    """Return the numbers of two values whose product is the scores.

    Of several such pairs, return the one whose factor c is nearest to
    1 / sqrt(width of a head).
    """
    found: list[tuple[float, tuple[int, int]]] = []
    for pair in permutations(values, 2):
        made = multiplied(scores, *(values[number] for number in pair))
        if made is not None:
            query, _, c, heads = made
            off = abs(c**2 * (query.size(1) // heads) - 1)
            found.append((off, pair))
    return min(found, key=lambda each: each[0], default=(0, None))[1]


def multiplied(scores: Tensor, query: Tensor, key: Tensor) -> Factors | None:
    """Return query, key, c if scores are c times query @ key, else None."""
    time = scores.size(-1)
    scores = scores[0] if scores.dim() == 4 else scores
    scores = scores.reshape(-1, time, time)
    heads = len(scores)
    tables = [as_table(value, time)[0] for value in (query, key)]
    if any(len(t) != time or t.size(1) % heads for t in tables):
        return None
    q, k = (t.reshape(time, heads, -1).movedim(1, 0) for t in tables)
    if q.shape != k.shape:
        return None
    products = q @ k.mT
    c = float((scores * products).sum() / products.square().sum())
    if largest(c * products - scores) > SAME_MAP_SHARE * largest(scores):
        return None
    return tables[0], tables[1], c, heads
