"""Matrices of numbers, small enough to travel inside a page.

Values of a forward pass have a byte a number: 128 is 0, 1 and 255 are the
largest of either sign, 0 is a masked score. Behind them the first numbers of
each position, in float32. Influence has a byte for a size from 1e-20 to 1e5 in
steps of a tenth of a decade. All in base64, row by row.
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

COLUMNS = 128  # of a map; of more features evenly spaced ones
NUMBERS = 6  # of each position that can be read
SAME_MAP_SHARE = 1e-5  # of the largest number: two so close are one map
SMALLEST, LARGEST = -20.0, 5.0
# Multiplications that one influence map may cost, and its sides.
EFFORT, SHORTEST, LONGEST = 6e9, 8, 48
DEEP = 3  # steps back from scores: by a scaled query to the query

Factors = tuple[Tensor, Tensor, float, int]  # query, key, c, heads


class ValueMaps:
    """Small maps of values; equal ones of both sides are one."""

    def __init__(self, time: int, length: int):
        self.time, self.length = time, length  # positions: shown, and run
        self.found: list[str] = []
        self.columns: list[tuple[int, ...]] = []

    def numbers(
        self, left: Tensor | None, right: Tensor | None, square: bool = False
    ) -> list[int | None]:
        """Return the number of each side's map, None where it has no value.

        The right is laid out as the left, and both have one scale. Of a
        square, positions by positions, every number of some heads is kept.
        """
        shown = [value for value in (left, right) if value is not None]
        scale = max(map(largest, shown), default=0.0) or 1.0
        if left is not None and right is not None:
            right, apart = nearest_layout(right, left, SAME_MAP_SHARE * scale)
            if apart <= SAME_MAP_SHARE * scale:
                return [self._add(left, scale, square)] * 2
        return [
            None if value is None else self._add(value, scale, square)
            for value in (left, right)
        ]

    def _add(self, value: Tensor, scale: float, square: bool) -> int:
        """Draw a map up to a scale, and return its number."""
        if square:  # of the first row, the heads that there is room for
            one = value[0] if value.dim() == 4 else value
            one = one.reshape(-1, self.length, self.length)
            one = one[: COLUMNS // self.time, : self.time, : self.time]
            heads, table = len(one), one.movedim(0, 1).flatten(1)
        else:
            table, heads = as_table(value, self.length)
            table = table[: self.time]
        width = min(COLUMNS, table.size(1))
        some = torch.linspace(0, table.size(1) - 1, width).round().long()
        picked = table[:, some]
        level = (picked / scale).clamp(-1, 1).nan_to_num(0.0)
        # 0 is a masked score, 128 a zero
        code = torch.where(picked == -torch.inf, 0, 128 + level * 127)
        read = width if square else NUMBERS
        numbers = table[:, :read].numpy().astype("<f4")
        data = code.round().to(torch.uint8).numpy().tobytes()
        data += numbers.tobytes()
        return self._keep(data, width, numbers.shape[1], heads, table.size(1))

    def factors(
        self, found: Sequence[Factors | None], one: bool
    ) -> list[tuple[int, int, float] | None]:
        """Keep each side's query and key of scores, once for one map."""
        kept: list[tuple[int, int, float] | None] = []
        for known in [found[0] or found[1]] if one else found:
            if known is None:
                kept.append(None)
                continue
            query, key, c, heads = known
            kept.append((self._rows(query, heads), self._rows(key, heads), c))
        return 2 * kept if one else kept

    def _rows(self, table: Tensor, heads: int) -> int:
        """Keep a table's numbers alone, of the heads there is room for."""
        shown = min(heads, COLUMNS // self.time)
        read = table.size(1) // heads * shown
        numbers = table[: self.time, :read].numpy().astype("<f4")
        return self._keep(numbers.tobytes(), 0, read, shown, read)

    def _keep(self, data: bytes, *columns: int) -> int:
        self.found.append(base64.b64encode(data).decode())
        self.columns.append(columns)
        return len(self.found) - 1


def sizes(matrix: Float[Tensor, "*shape"]) -> str:
    """Return |matrix| as bytes of base64: 0 is 0, 255 is NaN or more."""
    size = matrix.detach().cpu().double().abs().nan_to_num(nan=math.inf)
    scale = 254 / (LARGEST - SMALLEST)
    level = 1 + (size.clamp(min=1e-300).log10() - SMALLEST) * scale
    code = torch.where(size == 0, 0.0, level.round().clamp(1, 255))
    return base64.b64encode(code.to(torch.uint8).numpy().tobytes()).decode()


def influence_data(
    models: tuple[Any, Any], tokens: Int[Tensor, "1 time"]
) -> dict:
    """Return the influence maps of both models, and what they leak.

    The larger the model, the fewer of the text's tokens are tried.
    """
    count = sum(p.numel() for p in models[0].parameters())
    side = max(SHORTEST, min(LONGEST, math.isqrt(int(EFFORT) // count)))
    ids = tokens[0, :side]
    maps = [influence(model, ids, rounds=1) for model in models]
    return {
        "time": len(ids),
        "left": sizes(maps[0]),
        "right": sizes(maps[1]),
        "early": [m.triu(1).max().item() for m in maps],
        "largest": [m.max().item() for m in maps],
    }


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
        if largest(c * products - scores) <= SAME_MAP_SHARE * largest(scores):
            off = abs(c**2 * query.size(-1) - 1)
            found.append((off, (*pair, c, heads)))
    return min(found, key=lambda each: each[0], default=(0, None))[1]
