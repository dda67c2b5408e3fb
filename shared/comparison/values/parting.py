"""The first line of each side whose value the other side does not have."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from .insides import RAW_SCORES
from .matching import Matches, difference
from .places import HEAD, Place
from .side import Side, keep
from .value import Value

AHEAD = 24  # values of a call that are looked at for the nearest
ALIKE = 0.25  # of a value's size: two so close stand for the same thing


@dataclass(frozen=True)
class Parting:
    """Where two models part.

    Attributes:
        left: the line nearest to the right's.
        right: the line whose value is nowhere on the left.
        since: for each side the first line of a calculation of several
            steps, of which the named one is the first to be comparable.
        layer: its layer, or None.
        inputs: largest difference of what the right's line is computed
            from; None where it is computed from weights and tokens alone.
        difference: largest difference of the two; None where their sizes
            differ.
        factor: c where the right's value is c times the left's, else None.
        order: numbers of the two values in their runs.
    """

    left: Place
    right: Place
    since: tuple[Place, Place]
    layer: int | None
    inputs: float | None
    difference: float | None
    factor: float | None
    order: tuple[int, int]

    def __str__(self) -> str:
        right = self._place(self.right, self.since[1])
        layer = "" if self.layer is None else f", layer {self.layer}"
        given = ""
        if self.inputs is not None:
            bound = f" to {self.inputs:.1g}" if self.inputs else ""
            given = f"its inputs are equal{bound}, "
        left = self._place(self.left, self.since[0])
        start = f"they part at {right}{layer}: {given}its output is nowhere"
        if self.factor is not None and abs(self.factor - 1) < 1e-6:
            apart = "the same numbers in another order"
        elif self.factor is not None:
            apart = f"which it is {self.factor:.4g} times"
        elif self.difference is not None:
            apart = f"{self.difference:.2g} apart"
        else:
            return f"{start} on the left, which goes on at {left}"
        return f"{start} on the left; nearest is {left}, {apart}"

    @staticmethod
    def _place(place: Place, since: Place) -> str:
        if (since.path, since.line) == (place.path, place.line):
            return str(place)
        start = str(since.line)
        if since.path != place.path:
            start = f"{since.file}:{start}"
        return f"{place} (in steps from {start} on)"


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
        differences: of those seen, where known.
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
        self.open = [
            number
            for number in sorted(self.used - self.explained)
            if self.values[number].place.inside != RAW_SCORES
        ]

    def first_open(self) -> Value:
        """Return the first value whose inputs are explained and it is not."""
        for number in self.open:
            value = self.values[number]
            step = value.place.inside or not value.inputs
            if value.digest.trivial and step:
                continue  # a mask, or what dropout draws
            if self.explained.issuperset(value.inputs):
                return value
        return self.values[self.open[0]]

    def same_call(self, start: Value) -> list[Value]:
        """Return what the same call of a function goes on to compute.

        Only what is computed from the value and is not explained.
        """
        reached = {start.number}
        for number in self.open:
            value = self.values[number]
            same = (value.call, value.place.layer)
            if same != (start.call, start.place.layer):
                continue
            if reached.intersection(value.inputs):
                reached.add(number)
        found = [self.values[number] for number in sorted(reached)]
        # not what dropout draws
        plain = [v for v in found if not (v.place.inside and v.digest.trivial)]
        return (plain or found)[:AHEAD]

    def inputs_apart(self, value: Value) -> float | None:
        """Return how far a value's inputs are from the other side's."""
        apart = [
            self.differences.get(number, 0.0)
            if number in self.differences
            else self.inputs_apart(self.values[number])
            for number in value.inputs
        ]
        return max((a for a in apart if a is not None), default=None)

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
    firsts = ours.first_open(), theirs.first_open()
    known: set[tuple[object, ...]] = {
        (_key(ours.values[n]), _key(theirs.values[r]))
        for n, r in matches.partner.items()
    }
    *pair, apart, factor = comparable(
        sides, (ours.same_call(firsts[0]), theirs.same_call(firsts[1])), known
    )
    places = pair[0].place, pair[1].place
    layer = places[1].layer
    return Parting(
        left=places[0],
        right=places[1],
        since=(firsts[0].place, firsts[1].place),
        layer=places[0].layer if layer is None else layer,
        inputs=theirs.inputs_apart(firsts[1]),
        difference=apart if math.isfinite(apart) else None,
        factor=factor,
        order=(pair[0].number, pair[1].number),
    )


def comparable(
    sides: tuple[Side, Side],
    open_values: tuple[Sequence[Value], Sequence[Value]],
    known: set[tuple[object, ...]],
) -> tuple[Value, Value, float, float | None]:
    """Return the first two values that stand for the same thing.

    One side may take several steps to what the other does in one: each has
    its open values, what follows in the call where it parts. `known` are keys
    of the lines that are a pair in another layer. With the two go their
    largest difference, and c where the second is c times the first.
    """
    kept = [
        keep(side, [value.number for value in values])
        for side, values in zip(sides, open_values, strict=True)
    ]

    def apart(ours: Value, theirs: Value) -> float:
        return difference(kept[0][ours.number], kept[1][theirs.number])

    def factor(ours: Value, theirs: Value) -> float | None:
        scale = ours.digest.scale_of(theirs.digest)
        if scale is None:
            return None
        a, b = kept[0][ours.number] * scale, kept[1][theirs.number]
        gap = a.flatten().sort().values - b.flatten().sort().values
        alike = gap.abs().nan_to_num(0.0).max() <= 1e-6 * theirs.digest.size
        return scale if alike else None

    fitting: list[tuple[Value, Value, float]] = []
    for _, line in groupby(open_values[1], lambda v: _key(v)[:2]):
        fits, like = [], []
        for theirs in line:
            near = [
                (ours, theirs, apart(ours, theirs))
                for ours in open_values[0]
                if math.prod(ours.shape) == math.prod(theirs.shape)
            ]
            near.sort(key=itemgetter(2))
            like += [f for f in near if (_key(f[0]), _key(theirs)) in known]
            like += [f for f in near[:1] if f[2] <= ALIKE * f[0].digest.size]
            fits += near
        if like:
            same = (fit for fit in like if fit[0] is like[0][0])
            best = min(same, key=itemgetter(2))
            # where both sides have taken steps before, it is one of these
            before = (f for f in fitting if f[0].number < best[0].number)
            ours, theirs, gap = next(before, best)
            return ours, theirs, gap, factor(ours, theirs)
        fitting += fits
    for ours, theirs, gap in fitting:
        if (scale := factor(ours, theirs)) is not None:
            return ours, theirs, gap, scale
    if fitting:
        return *fitting[0], None
    return open_values[0][0], open_values[1][0], math.inf, None


def _key(value: Value) -> tuple[object, ...]:
    place = value.place
    return place.path, place.line, place.span, place.inside
