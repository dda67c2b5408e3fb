"""Which values of two runs are the same, whatever their layout."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, permutations

import numpy as np
import torch
from torch import Tensor

from .side import Side, unit_of
from .value import Value, plain

NEAR = 1e-3  # of a value's size: digests that are looked at again
MOST = 6  # candidates for one value
TIMES_NOISE = 16  # a difference so many times the noise is none of rounding
ROUNDING = 64  # units of rounding of the largest number, always allowed
ROUNDING_ALONE = 2**12  # the same where no weights can be nudged
AT_ONCE = 2**27  # numbers that are kept of one side at a time: 1 GiB
ORDERS = 720  # orders of axes that are tried: all of six axes


@dataclass(frozen=True)
class Matches:
    """What matching two recordings found."""

    # numbers of a value on the left and on the right, and their largest
    # absolute difference, in the order of the left
    pairs: Sequence[tuple[int, int, float]]
    # numbers of each side whose value is on the other, those computed twice
    # included
    seen: tuple[set[int], set[int]]
    # numbers of each side whose value is almost on the other, by more than
    # rounding
    close: tuple[set[int], set[int]]


def match(left: Side, right: Side) -> Matches:
    """Find the values that are on both sides.

    Digests propose; values, brought into one layout, decide. What passes
    as rounding is measured: the left runs once more with all its weights
    changed by a unit of rounding.
    """
    for side, other in ((left, right), (right, left)):
        if _goes_head_by_head(side, other):
            other.by_heads = True
            other.record()
    candidates = _propose(left.values, right.values)
    for ours, theirs in (
        (left.last, right.last),
        (left.normalised, right.normalised),
    ):
        if theirs not in candidates.setdefault(ours, []):
            candidates[ours].append(theirs)
    near: dict[tuple[int, int], float] = {}
    for numbers in _batches(left.values, sorted(candidates)):
        chosen = {number: candidates[number] for number in numbers}
        near |= _measure(left, right, chosen)
    pairs: list[tuple[int, int, float]] = []
    taken = set[int](), set[int]()
    for (ours, theirs), apart in sorted(near.items()):
        if ours not in taken[0] and theirs not in taken[1]:
            pairs.append((ours, theirs, apart))
            taken[0].add(ours)
            taken[1].add(theirs)
    seen = {ours for ours, _ in near}, {theirs for _, theirs in near}
    close = [
        (ours, theirs)
        for ours, others in candidates.items()
        for theirs in others
        if ours not in seen[0] and theirs not in seen[1]
    ]
    return Matches(pairs, seen, ({n for n, _ in close}, {n for _, n in close}))


def _propose(
    left: Sequence[Value], right: Sequence[Value]
) -> dict[int, list[int]]:
    """Return for values of the left those on the right that may be equal."""
    groups: dict[tuple[int, int], list[Value]] = {}
    for value in right:
        key = value.digest.finite, value.digest.other
        groups.setdefault(key, []).append(value)
    proposed = {}
    for value in left:
        ours = value.digest
        others = [
            other
            for other in groups.get((ours.finite, ours.other), [])
            if _may_pair(value, other)
        ]
        if not others:
            continue
        marks = np.stack([other.digest.marks for other in others])
        apart = np.abs(marks - ours.marks).max(1)
        order = apart.argsort(kind="stable")[:MOST]
        near = [
            others[i].number for i in order if apart[i] <= NEAR * ours.size
        ]
        if near:
            proposed[value.number] = near
    return proposed


def _may_pair(ours: Value, theirs: Value) -> bool:
    """Whether two values can stand for the same thing.

    What an operation gives is no step inside another of its kind, though
    their numbers may be the same.
    """
    return not (
        ours.digest.trivial
        or theirs.digest.trivial
        or (ours.own_step and theirs.place.inside)
        or (theirs.own_step and ours.place.inside)
    )


def _goes_head_by_head(side: Side, other: Side) -> bool:
    """Whether a side has values of the size of one head of the other's."""
    heads = {
        (value.shape[0], *value.shape[2:])
        for value in other.values
        if len(value.shape) == 4 and value.shape[1] > 1
    }
    return any(value.shape in heads for value in side.values)


def _batches(
    values: Sequence[Value], numbers: Sequence[int]
) -> Iterator[list[int]]:
    """Split numbers so that the values of each part fit into memory."""
    ends = accumulate(math.prod(values[number].shape) for number in numbers)
    for _, batch in groupby(
        zip(numbers, ends, strict=True), key=lambda pair: pair[1] // AT_ONCE
    ):
        yield [number for number, _ in batch]


def _measure(
    left: Side, right: Side, candidates: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int], float]:
    """Return the differences of those candidates that are equal."""
    kept = left.keep(candidates)
    tolerance = _tolerances(left, right, kept)
    found: dict[tuple[int, int], float] = {}

    def compare(theirs: int, value: Tensor) -> None:
        for ours, others in candidates.items():
            if theirs in others:
                apart = difference(kept[ours], value, tolerance[ours])
                if apart <= tolerance[ours]:
                    found[ours, theirs] = apart

    right.visit({r for others in candidates.values() for r in others}, compare)
    return found


def _tolerances(
    left: Side, right: Side, kept: Mapping[int, Tensor]
) -> dict[int, float]:
    """Return for each value what passes as rounding."""
    units = ROUNDING if left.nudgeable else ROUNDING_ALONE
    eps = max(torch.finfo(left.dtype).eps, torch.finfo(right.dtype).eps)
    sizes = {number: largest(value) for number, value in kept.items()}
    tolerance = {number: units * eps * size for number, size in sizes.items()}

    def add_noise(number: int, value: Tensor) -> None:
        tolerance[number] += TIMES_NOISE * difference(kept[number], value)

    if left.nudgeable:
        left.visit(kept, add_noise, unit_of(left, right) / 2)
    return {n: min(tolerance[n], NEAR * size) for n, size in sizes.items()}


def difference(a: Tensor, b: Tensor, enough: float = 0.0) -> float:
    """Return the largest difference of two values in one layout.

    The least over the orders of axes; inf for different sizes. No order is
    tried after one with a difference that is small enough.
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
    for other in (
        _layouts(value, like) if value.numel() == like.numel() else ()
    ):
        gap = torch.where(like == other, 0.0, (like - other).abs())
        apart = float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max())
        if apart < best[1]:
            best = other, apart
        if apart <= enough:
            break
    return best


def _layouts(value: Tensor, like: Tensor) -> Iterator[Tensor]:
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
