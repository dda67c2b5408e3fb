"""Which values of two runs are the same, whatever their layout."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

import numpy as np
import torch
from torch import Tensor

from .side import Side, keep, unit_of
from .value import Value, may_pair, plain

NEAR = 1e-3  # of a value's size: digests that are looked at again
MOST = 6  # candidates for one value
TIMES_NOISE = 16  # a difference so many times the noise is none of rounding
ROUNDING = 64  # units of rounding of the largest number, always allowed
ROUNDING_ALONE = 2**12  # the same where no weights can be nudged
AT_ONCE = 2**27  # numbers that are kept of one side at a time: 1 GiB
ORDERS = 720  # orders of axes that are tried: all of six axes


@dataclass(frozen=True)
class Matches:
    """What matching two recordings found.

    Attributes:
        partner: for numbers of the left the number on the right.
        difference: for the same the largest absolute difference.
        seen: numbers of each side whose value is on the other, those
            computed twice included.
        close: numbers of each side whose value is almost on the other, by
            more than rounding.
    """

    partner: dict[int, int]
    difference: dict[int, float]
    seen: tuple[set[int], set[int]]
    close: tuple[set[int], set[int]]


def match(left: Side, right: Side) -> Matches:
    """Find the values that are on both sides.

    Digests propose; values, brought into one layout, decide. What passes
    as rounding is measured: the left runs once more with all its weights
    changed by a unit of rounding.
    """
    for side, other in ((left, right), (right, left)):
        if goes_head_by_head(side, other):
            other.split_heads()
    values = left.values, right.values
    candidates = propose(*values)
    for ends in zip(
        (left.last, left.normalised),
        (right.last, right.normalised),
        strict=True,
    ):
        others = candidates.setdefault(ends[0], [])
        if ends[1] not in others:
            others.append(ends[1])
    near: dict[int, list[tuple[int, float]]] = {}
    for numbers in batches(values[0], sorted(candidates)):
        chosen = {number: candidates[number] for number in numbers}
        for (ours, theirs), apart in _measure(left, right, chosen).items():
            near.setdefault(ours, []).append((theirs, apart))
    partner: dict[int, int] = {}
    difference: dict[int, float] = {}
    taken: set[int] = set()
    for ours, found in sorted(near.items()):
        free = [pair for pair in sorted(found) if pair[0] not in taken]
        if free:
            partner[ours], difference[ours] = free[0]
            taken.add(partner[ours])
    seen = set(near), {r for found in near.values() for r, _ in found}
    close = [
        (ours, theirs)
        for ours, others in candidates.items()
        for theirs in others
        if ours not in seen[0] and theirs not in seen[1]
    ]
    sides = {n for n, _ in close}, {r for _, r in close}
    return Matches(partner, difference, seen, sides)


def propose(
    left: Sequence[Value], right: Sequence[Value]
) -> dict[int, list[int]]:
    """Return for values of the left those on the right that may be equal."""
    groups: dict[tuple[int, int], list[Value]] = {}
    for value in right:
        if not value.digest.trivial:
            key = value.digest.finite, value.digest.other
            groups.setdefault(key, []).append(value)
    proposed = {}
    for value in left:
        ours = value.digest
        others = groups.get((ours.finite, ours.other), [])
        if ours.trivial or not others:
            continue
        marks = np.stack([other.digest.marks for other in others])
        apart = np.abs(marks - ours.marks).max(1)
        near = [
            others[i].number
            for i in apart.argsort(kind="stable")
            if apart[i] <= NEAR * ours.size and may_pair(value, others[i])
        ]
        if near:
            proposed[value.number] = near[:MOST]
    return proposed


def goes_head_by_head(side: Side, other: Side) -> bool:
    """Whether a side has values of the size of one head of the other's."""
    heads = {
        (value.shape[0], *value.shape[2:])
        for value in other.values
        if len(value.shape) == 4 and value.shape[1] > 1
    }
    return any(value.shape in heads for value in side.values)


def batches(
    values: Sequence[Value], numbers: Sequence[int]
) -> Iterator[list[int]]:
    """Split numbers so that the values of each part fit into memory."""
    batch: list[int] = []
    room = AT_ONCE
    for number in numbers:
        size = math.prod(values[number].shape)
        if batch and size > room:
            yield batch
            batch, room = [], AT_ONCE
        batch.append(number)
        room -= size
    if batch:
        yield batch


def _measure(
    left: Side, right: Side, candidates: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int], float]:
    """Return the differences of those candidates that are equal."""
    kept = keep(left, candidates)
    tolerance = _tolerances(left, right, kept)
    found: dict[tuple[int, int], float] = {}
    wanted: dict[int, list[int]] = {}
    for ours, others in candidates.items():
        for theirs in others:
            wanted.setdefault(theirs, []).append(ours)

    def compare(theirs: int) -> Callable[[Tensor], None]:
        def call(value: Tensor) -> None:
            for ours in wanted[theirs]:
                apart = difference(kept[ours], value, tolerance[ours])
                if apart <= tolerance[ours]:
                    found[ours, theirs] = apart

        return call

    right.visit({theirs: compare(theirs) for theirs in wanted})
    return found


def _tolerances(
    left: Side, right: Side, kept: Mapping[int, Tensor]
) -> dict[int, float]:
    """Return for each value what passes as rounding."""
    units = ROUNDING if left.nudgeable else ROUNDING_ALONE
    eps = max(torch.finfo(left.dtype).eps, torch.finfo(right.dtype).eps)
    tolerance = {n: units * eps * largest(v) for n, v in kept.items()}

    def compare(number: int) -> Callable[[Tensor], None]:
        def call(value: Tensor) -> None:
            noise = difference(kept[number], value)
            tolerance[number] += TIMES_NOISE * noise

        return call

    if left.nudgeable:
        unit = unit_of(left, right) / 2
        left.visit({number: compare(number) for number in kept}, unit)
    return {
        number: min(size, NEAR * largest(kept[number]))
        for number, size in tolerance.items()
    }


def difference(a: Tensor, b: Tensor, enough: float = 0.0) -> float:
    """Return the largest difference of two values in one layout.

    Args:
        a: one value.
        b: the other, its axes in any order, joined or split.
        enough: no order of axes is tried after one with this difference.

    Returns:
        The least over the orders of axes; inf for different sizes.
    """
    return nearest_layout(plain(b), plain(a), enough)[1]


def nearest_layout(
    value: Tensor, like: Tensor, enough: float
) -> tuple[Tensor, float]:
    """Return a value in the layout nearest to another's, and how far it is.

    As it is, and inf, where the sizes differ. No layout is tried after one
    that is near enough.
    """
    best = value, math.inf
    for other in layouts(value, like) if value.numel() == like.numel() else ():
        gap = torch.where(like == other, 0.0, (like - other).abs())
        apart = float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max())
        if apart < best[1]:
            best = other, apart
        if apart <= enough:
            break
    return best


def layouts(value: Tensor, like: Tensor) -> Iterator[Tensor]:
    """Yield a value in another's shape, for each order of their axes.

    Axes are permuted where there are more, and joined to what the other
    has.
    """
    few, many = value.squeeze(), like.squeeze()
    if few.dim() >= many.dim():
        for axes in islice(permutations(range(few.dim())), ORDERS):
            yield few.permute(axes).reshape(like.shape)
        return
    for axes in islice(permutations(range(many.dim())), ORDERS):
        turned = few.reshape([many.shape[axis] for axis in axes])
        back = sorted(range(many.dim()), key=axes.__getitem__)
        yield turned.permute(back).reshape(like.shape)


def largest(value: Tensor) -> float:
    """Return the size of the largest finite number."""
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
