"""A likely cause of a fault, where a factor betrays it."""

from collections.abc import Collection, Sequence

from torch import Tensor

from .layouts import difference, nearest_layout

CLOSE = 1e-5  # relative: a factor so close to a root is that root


def likely_cause(factor: float | None, widths: Collection[int]) -> str:
    """Return what it suggests that the right is so many times the left.

    2.828 is the root of 8, the width of a head: the scores lack their
    1 / sqrt(8). 5.657 is the root of 32, the model's width: the embedding's
    scale. Widths are sizes of axes of the values around.
    """
    if factor is None or factor <= 0:
        return ""
    size = max(factor, 1 / factor)
    over, under = ("", "1 / ") if factor > 1 else ("1 / ", "")
    for power, root, name in ((2, "the root of ", "sqrt({})"), (1, "", "{}")):
        width = round(size**power)
        near = abs(size / width ** (1 / power) - 1) < CLOSE
        if near and width > 1 and width in widths:
            return (
                f"{over}{size:.4g} is {over}{root}{width}: is a factor "
                f"{under}{name.format(width)} missing?"
            )
    return ""


def own_input(
    left: Tensor | None, right: Tensor | None, inputs: Sequence[Tensor]
) -> str:
    """Return what it suggests that two values differ by an input, or ""."""
    if left is None or right is None or left.numel() != right.numel():
        return ""
    gap = nearest_layout(right, left, 0.0)[0] - left
    for value in inputs:
        near = CLOSE * float(value.abs().max())
        if any(difference(value, c * gap, near) <= near for c in (1, -1)):
            return "they differ by its input: 1 + weight on one side?"
    return ""
