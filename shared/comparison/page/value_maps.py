"""Values of a forward pass as small maps that travel inside a page.

A byte a number: 128 is 0, 1 and 255 are the largest of either sign, 0 is a
masked score. Behind them the first numbers of each position, in float32.
"""

import base64

import torch
from jaxtyping import Float
from torch import Tensor

from ..values.layouts import largest, nearest_layout

COLUMNS = 128  # of a map; of more features evenly spaced ones
NUMBERS = 6  # of each position that can be read
NEAR = 1e-6  # of the largest number: two so close are one map


class ValueMaps:
    """Small maps of values; equal ones of both sides are one.

    Args:
        time: positions on each.
        length: positions of the run.
    """

    def __init__(self, time: int, length: int):
        self.time, self.length = time, length
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
        self.found.append(base64.b64encode(data).decode())
        self.columns.append((width, numbers.shape[1], heads, table.size(1)))
        return len(self.found) - 1


def as_table(
    value: Float[Tensor, "..."], length: int
) -> tuple[Float[Tensor, "time columns"], int]:
    """Lay a value out as positions by features, heads side by side.

    Of several rows the first is taken. Returns the table, and how many heads
    stand side by side in it.
    """
    if value.dim() > 2:
        value = value[0]
    while value.dim() > 2 and value.size(0) == 1:
        value = value[0]
    if value.dim() > 1 and value.size(0) == 1 and value.size(1) == length:
        value = value[0]
    if value.dim() == 1:
        value = value.unsqueeze(1)
    axes = [axis for axis in range(value.dim()) if value.size(axis) == length]
    if not axes:
        return value.reshape(1, -1), 1
    # of two that fit, the one before the last: (heads, time, time)
    axis = min(axes, key=lambda a: abs(a - (value.dim() - 2)))
    table = value.movedim(axis, 0)
    heads = table.size(1) if table.dim() > 2 else 1
    return table.reshape(length, -1), heads
