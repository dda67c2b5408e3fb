"""A likely cause of a fault, where a factor betrays it."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from .layouts import difference, nearest_layout

CLOSE = 1e-5  # relative: a factor so close to a root is that root


def likely_cause(factor: float | None, widths: Iterable[int]) -> str:
    """Return what a factor between two values suggests, or "".

    2.828 is the root of 8, the width of a head: the scores lack their
    1 / sqrt(8). 5.657 is the root of 32, the model's width: the embedding's
    scale.

    Args:
        factor: the right's numbers are so many times the left's.
        widths: sizes of axes of the values around.
    """
    if factor is None or abs(abs(factor) - 1) < CLOSE:
        return ""
    for width in sorted({*widths} - {0, 1}):
        for power, words in ((0.5, "the root of "), (1.0, "")):
            size = width**power
            for times, missing in ((size, "/"), (1 / size, "*")):
                if abs(factor / times - 1) < CLOSE:
                    root = f"sqrt({width})" if power < 1 else str(width)
                    inverse = "" if times > 1 else "1 / "
                    return (
                        f"{inverse}{size:.4g} is {inverse}{words}{width}: is "
                        f"a factor {'1 / ' if missing == '/' else ''}{root} "
                        f"missing?"
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
        if value.numel() == gap.numel() and (
            difference(value, gap, near) <= near
            or difference(value, -gap, near) <= near
        ):
            return "they differ by its input: 1 + weight on one side?"
    return ""
