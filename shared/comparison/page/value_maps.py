"""Values of a forward pass as small maps that travel inside a page.

A byte a number: 128 is 0, 1 and 255 are the largest of either sign, 0 is a
masked score. Behind them the first numbers of each position, in float32.
"""

import base64
from collections.abc import Sequence

import torch
from torch import Tensor

from ..values.factors import Factors
from ..values.layouts import as_table, largest, nearest_layout

COLUMNS = 128  # of a map; of more features evenly spaced ones
NUMBERS = 6  # of each position that can be read
NEAR = 1e-6  # of the largest number: two so close are one map


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
            right, apart = nearest_layout(right, left, NEAR * scale)
            if apart <= NEAR * scale:
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
