"""Bring two values into one layout, and measure their difference."""

import math
from collections.abc import Iterator
from itertools import combinations, islice, permutations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...running.rounding import minus
from ...tracing.value import plain

ORDERS = 720  # most orders of axes to try: as many as six axes have


def difference(a: Tensor, b: Tensor, enough: float = 0.0) -> float:
    """Return the largest difference of two values in their best layout.

    The result is inf if the sizes differ. The search stops at the first order
    of axes for which the difference is at most `enough`.
    """
    return nearest_layout(plain(b), plain(a), enough)[1]


def nearest_layout(
    value: Tensor, like: Tensor, enough: float
) -> tuple[Tensor, float]:
    """Return a value in the layout nearest to `like`, and the distance.

    If the sizes differ, return the value unchanged and a distance of inf. The
    search stops at the first layout whose distance is at most `enough`.
    """
    best = value, math.inf
    same_size = value.numel() == like.numel()
    for other in _layouts(value, like) if same_size else ():
        apart = float(torch.linalg.vector_norm(like - other, math.inf))
        if not math.isfinite(apart):  # the same infinity counts as equal
            gap = minus(like, other).abs()
            apart = float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max())
        if apart < best[1]:
            best = other, apart
        if apart <= enough:
            break
    return best


def _layouts(value: Tensor, like: Tensor) -> Iterator[Tensor]:
    """Yield a value in the shape of `like`, for each order of their axes.

    The axes of the tensor with more axes are permuted, then joined into those
    of the other tensor. Axes of equal size keep their order, because a
    transposed square is a different value.
    """
    few, many = value.squeeze(), like.squeeze()
    alone = few.dim() < many.dim()  # like has more axes: permute its axes
    free = alone or sorted(few.shape) != sorted(many.shape)
    turned = many if alone else few
    for axes in islice(permutations(range(turned.dim())), ORDERS):
        shape = [turned.shape[axis] for axis in axes]
        if alone:
            back = sorted(range(len(axes)), key=axes.__getitem__)
            yield few.reshape(shape).permute(back).reshape(like.shape)
            continue
        pairs = combinations(axes, 2)
        kept = all(few.size(a) != few.size(b) or a < b for a, b in pairs)
        if free or (shape == [*many.shape] and kept):
            yield few.permute(axes).reshape(like.shape)


def largest(value: Tensor) -> float:
    """Return the largest absolute value of a tensor's finite entries."""
    if not value.numel():
        return 0.0
    size = float(torch.linalg.vector_norm(value, math.inf))
    # most often all entries are finite, so none need to be left out
    return size if math.isfinite(size) else largest(value[value.isfinite()])


def spread(value: Tensor, exact: Tensor) -> float:
    """Estimate a value's rounding error from the same value in float64."""
    gap = minus(value, exact.view_as(value)).nan_to_num(0.0, 0.0, 0.0)
    finite = value.nan_to_num(0.0, 0.0, 0.0)
    size = float(torch.linalg.vector_norm(finite))
    share = float(torch.linalg.vector_norm(gap)) / size if size else 0.0
    return max(largest(gap), share * largest(value))


def sorted_apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two values' sorted entries."""
    x, y = (np.sort(value.flatten().numpy()) for value in (a, b))
    with np.errstate(invalid="ignore"):
        gap = np.abs(x - y)
    gap[x == y] = 0
    return float(np.nan_to_num(gap, nan=math.inf).max())


def as_table(
    value: Float[Tensor, "..."], length: int
) -> tuple[Float[Tensor, "time columns"], int]:
    """Return a table of positions by features, and the number of heads.

    The features of all heads are next to each other. If a batch has several
    rows, the first is used.
    """
    if value.dim() > 2:
        value = value[0]
    while value.dim() > 2 and value.size(0) == 1:
        value = value[0]
    axes = [axis for axis in range(value.dim()) if value.size(axis) == length]
    if not axes:
        return value.reshape(1, -1), 1
    # of two axes as long as the text, use the second to last, as in (heads,
    # time, time)
    axis = min(axes, key=lambda a: abs(a - (value.dim() - 2)))
    table = value.movedim(axis, 0)
    heads = table.size(1) if table.dim() > 2 else 1
    return table.reshape(length, -1), heads
