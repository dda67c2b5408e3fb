"""What of a model the other one explains, and the first line it does not."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from .insides import RAW_SCORES
from .matching import Matches, difference
from .places import HEAD
from .rows import NOWHERE, Parting
from .side import Side
from .value import Value

AHEAD = 24  # values of a call that are looked at for the nearest
ALIKE = 0.25  # of a value's size: two so close stand for the same thing
FAR = 2.0  # of a value's size: two so far apart have nothing in common


class Flow:
    """What leads to a model's scores, and how far it is explained.

    A value is explained where the other side has it, or has something that
    is computed from it: a step of its own on the way to a common value. So
    is a part of a value that the other side has. What the other side has
    almost is none: what follows may hide it, as small weights do.

    Args:
        side: whose values.
        seen: numbers of those that the other side has.
        close: numbers of those that it has almost.
        differences: of those in a pair.
    """

    def __init__(
        self,
        side: Side,
        seen: set[int],
        close: set[int],
        differences: dict[int, float],
    ):
        self.values = side.values
        heads = [v for v in self.values if HEAD.search(v.place.inside)]
        unseen = {v.inputs for v in heads if v.number not in seen}
        # one head says little of the others: perhaps it is a position
        self.seen = seen - {v.number for v in heads if v.inputs in unseen}
        self.differences = differences
        self.used = self._upstream([side.normalised])
        parts = set(self.seen)
        for value in self.values:
            if value.view and parts.issuperset(value.inputs):
                parts.add(value.number)
        self.explained = self._upstream(self.seen) - close | parts
        # the heads go with the whole
        for known in (self.used, self.explained):
            known |= {v.number for v in heads if known.issuperset(v.inputs)}
        self.open = [
            value
            for value in self.values
            if value.number in self.used - self.explained
            and value.place.inside != RAW_SCORES
        ]

    def first_open(self) -> Value:
        """Return the first value whose inputs are explained and it is not."""
        for value in self.open:
            mask = value.digest.trivial and not value.inputs
            if not mask and self.explained.issuperset(value.inputs):
                return value
        return self.open[0]

    def same_call(self, start: Value) -> list[Value]:
        """Return what the same call of a function goes on to compute.

        Only what is computed from the value and is not explained.
        """
        reached = {start.number: start}
        for value in self.open:
            if value.call == start.call and reached.keys() & value.inputs:
                reached[value.number] = value
        return [reached[number] for number in sorted(reached)][:AHEAD]

    def inputs_apart(self, value: Value) -> float | None:
        """Return how far a value's inputs are from the other side's."""
        apart = [
            self.differences[number]
            if number in self.differences
            else self.inputs_apart(self.values[number])
            for number in value.inputs
        ]
        return max((a for a in apart if a is not None), default=None)

    def lines_alone(self, other: "Flow") -> Iterator[tuple[Value, str]]:
        """Yield the values that are in no pair, and what is known of each.

        Not the steps of an operation that no line takes by itself.
        """
        for value in self.values:
            paired = value.number in self.differences
            inside = value.place.inside and value.number not in self.seen
            if not (paired or inside or value.digest.trivial):
                yield value, self._why_alone(value, other)

    def _why_alone(self, value: Value, other: "Flow") -> str:
        if value.number in self.seen:
            return "computed once more"
        for theirs in other.values:
            scale = theirs.digest.scale_of(value.digest)
            if scale is not None and abs(scale - 1) > 1e-6:
                return f"{scale:.4g} times {theirs.place}"
        if value.number not in self.used:
            return "no part of the scores"
        if value.number not in self.explained:
            return NOWHERE
        reached = {value.number}
        for later in self.values[value.number + 1 :]:
            if reached.intersection(later.inputs):
                reached.add(later.number)
                if later.number in self.seen:
                    place = later.place
                    return f"a step to line {place.line} `{place.op}`"
        return ""

    def _upstream(self, numbers: Iterable[int]) -> set[int]:
        """Return the numbers and all that they are computed from."""
        found = set(numbers)
        for value in reversed(self.values):
            if value.number in found:
                found.update(value.inputs)
        return found


def find_parting(
    sides: tuple[Side, Side], flows: tuple[Flow, Flow], matches: Matches
) -> Parting:
    """Find the first lines that part, in two models that do."""
    ours, theirs = flows
    first = theirs.first_open()
    known: set[tuple[object, object]] = {
        (_line(ours.values[n]), _line(theirs.values[r]))
        for n, r, _ in matches.pairs
    }
    opened = ours.same_call(ours.first_open()), theirs.same_call(first)
    kept = [
        side.keep(value.number for value in values)
        for side, values in zip(sides, opened, strict=True)
    ]
    left, right, apart = _comparable(opened, kept, known)
    return Parting(
        left.place,
        right.place,
        right.shape,
        apart if math.isfinite(apart) else None,
        order=(left.number, right.number),
        inputs=theirs.inputs_apart(first),
        factor=_factor(left, right, kept),
    )


class Fit(NamedTuple):
    """Two values that may stand for the same thing."""

    ours: Value
    theirs: Value
    apart: float


def _comparable(
    open_values: tuple[Sequence[Value], Sequence[Value]],
    kept: Sequence[Mapping[int, Tensor]],
    known: set[tuple[object, object]],
) -> Fit:
    """Return the first two values that stand for the same thing.

    One side may take several steps to what the other does in one: each has
    its open values, what follows in the call where it parts. `known` are
    lines that are a pair in another layer.
    """
    fits: list[Fit] = []
    for _, line in groupby(open_values[1], lambda v: _line(v)[:2]):
        like: list[Fit] = []
        for theirs in line:
            tensor = kept[1][theirs.number]
            near = [
                Fit(ours, theirs, difference(kept[0][ours.number], tensor))
                for ours in open_values[0]
                if math.prod(ours.shape) == math.prod(theirs.shape)
            ]
            near.sort(key=attrgetter("apart"))
            fits += near
            like += [
                f for f in near if (_line(f.ours), _line(theirs)) in known
            ]
            like += [
                f
                for i, f in enumerate(near)
                if (i == 0 and f.apart <= ALIKE * f.ours.digest.size)
                or f.ours.digest.scale_of(theirs.digest) is not None
            ]
        if not like:
            continue
        best = min(
            (fit for fit in like if fit.ours is like[0].ours),
            key=attrgetter("apart"),
        )
        earlier = [
            fit
            for fit in fits
            if fit.ours.number < best.ours.number
            and fit.theirs.number < best.theirs.number
        ]
        if not earlier:
            return best
        # both sides have taken steps before: it is one of these
        step = earlier[0]
        if step.apart > FAR * step.ours.digest.size:
            return Fit(open_values[0][0], step.theirs, math.inf)
        return step
    return Fit(open_values[0][0], open_values[1][0], math.inf)


def _factor(
    left: Value, right: Value, kept: Sequence[Mapping[int, Tensor]]
) -> float | None:
    """Return c where the second is c times the first, in any order."""
    scale = left.digest.scale_of(right.digest)
    if scale is None:
        return None
    ours = (kept[0][left.number] * scale).flatten().sort().values
    theirs = kept[1][right.number].flatten().sort().values
    gap = (ours - theirs).abs().nan_to_num(0.0).max()
    return scale if gap <= 1e-6 * right.digest.size else None


def _line(value: Value) -> tuple[object, ...]:
    place = value.place
    return place.path, place.line, place.span, place.inside
