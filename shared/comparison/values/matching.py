"""Find the values that two runs have in common, in any layout."""

import math
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from ...running.places import Place
from ...running.tolerances import (
    DIGEST_SHARE,
    DIGEST_UNITS,
    FLOOR_UNITS,
    FLOOR_UNITS_OF_16_BITS,
    MEASURED_NOISES,
    MEASURED_UNITS,
    MEASURED_UNITS_OF_16_BITS,
    NUDGE_NOISES,
    NUDGE_NOISES_OF_16_BITS,
    OWN_UNITS,
    RECORDED_UNITS,
    UNNUDGED_UNITS,
)
from ...tracing.value import Value, plain
from .layouts import difference, largest, sorted_apart, spread
from .recording import name_of
from .side import Side, unit_of

CANDIDATES_OF_A_VALUE = 6
NUMBERS_KEPT = 2**25  # most entries of one side to keep at a time: 256 MiB

# a side's run in float64, and a table from its value numbers to those of the
# compared run
Exact = tuple[Side, dict[int, int]]
Pairs = dict[tuple[int, int], float]  # pairs of value numbers, with distances
Sides = tuple[set[int], set[int]]  # value numbers: of the left, of the right
LAYER = "{i}"  # the placeholder for a layer's number in the user's table


@dataclass
class Matches:
    """The pairs of a left and a right value, found by matching two runs.

    Each pair has the largest absolute difference of the two values.
    """

    named: Sequence[tuple[int, int]]  # pairs that the user named
    scores: tuple[int, int]  # value numbers of both log-probabilities
    equal: Pairs = field(default_factory=dict)
    permuted: Pairs = field(default_factory=dict)  # equal in another order
    far: Pairs = field(default_factory=dict)  # compared, and not equal
    # for each left value's number, the difference that passes as rounding
    tolerance: dict[int, float] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> Pairs:
        """Return the pairs, with at most one counterpart for each value.

        Counterparts with their entries in the same order are preferred.
        """
        pairs = _one_to_one(self.equal, (set(), set()))
        return pairs | _one_to_one(self.permuted, as_sides(self.equal))

    @property
    def apart(self) -> float:
        """Return the distance of the log-probabilities."""
        found = self.equal | self.permuted | self.far
        return found.get(self.scores, 0.0)

    @property
    def rounding(self) -> float:
        """Return how far rounding may move log-probabilities; 0 if unknown."""
        return self.tolerance.get(self.scores[0], 0.0)

    @property
    def named_apart(self) -> Pairs:
        """Return the pairs that the user named and that differ."""
        return {two: self.far[two] for two in self.named if two in self.far}

    @property
    def known_on(self) -> Sides:
        """Return, for each side, the numbers of the values that both have."""
        found = as_sides(self.equal | self.permuted)
        named = as_sides(self.named_apart)
        return found[0] - named[0], found[1] - named[1]

    @property
    def near(self) -> list[tuple[int, int]]:
        """Return compared pairs in which neither value has a counterpart."""
        ours, theirs = as_sides(self.equal | self.permuted)
        return [(n, r) for n, r in self.far if not (n in ours or r in theirs)]


def as_sides(pairs: Iterable[tuple[int, int]]) -> Sides:
    """Split pairs into the left's value numbers and the right's."""
    pairs = [*pairs]
    return {n for n, _ in pairs}, {r for _, r in pairs}


def match(
    left: Side,
    right: Side,
    tolerance: float = 0.0,
    table: Iterable[tuple[str, str]] = (),
) -> Matches:
    """Find the values that both sides compute.

    Similar digests propose a pair, then its entries are compared in one
    layout. The left model runs again to measure rounding: in float64, or with
    slightly changed weights if it ran in float64. A difference of up to
    `tolerance` times a value's largest entry always passes. The scores and
    the pairs in the user's table are always compared.

    If only one side computes head by head, the other is recorded again head
    by head. This renumbers its values.
    """
    for side, other in ((left, right), (right, left)):
        if _goes_head_by_head(side, other):
            other.by_heads = True
            other.record()
    named = pair_by_name((left, right), table)
    eps = max(torch.finfo(side.dtype).eps for side in (left, right))
    near = max(DIGEST_SHARE, DIGEST_UNITS * eps, 2 * tolerance)
    candidates = _propose(left.values, right.values, near)
    scores = left.normalised, right.normalised
    forced = {*named}
    if left.scored and right.scored:
        forced |= {(left.last, right.last), scores}
    for ours, theirs in sorted(forced):
        if theirs not in candidates.setdefault(ours, []):
            candidates[ours].append(theirs)
    found = Matches(named, scores)
    bounds = tolerance, near, _in_float64(left)
    for numbers in _batches(left.values, sorted(candidates)):
        chosen = {number: candidates[number] for number in numbers}
        _measure(left, right, chosen, forced, found, bounds)
    return found


def _one_to_one(found: Pairs, taken: Sides) -> Pairs:
    """Return the pairs whose two values are in no other pair yet."""
    pairs = {}
    for two, apart in sorted(found.items()):
        if two[0] not in taken[0] and two[1] not in taken[1]:
            pairs[two] = apart
            taken[0].add(two[0])
            taken[1].add(two[1])
    return pairs


def _propose(
    left: Sequence[Value], right: Sequence[Value], within: float
) -> dict[int, list[int]]:
    """Return, for left values, the right values that may equal them."""
    groups: dict[tuple[int, int], list[Value]] = {}
    for value in right:
        key = value.digest.finite, value.digest.other
        if not value.digest.trivial:
            groups.setdefault(key, []).append(value)
    proposed = {}
    for value in left:
        ours = value.digest
        others = [
            other
            for other in groups.get((ours.finite, ours.other), [])
            # An operation's result is no counterpart of a step inside a fused
            # operation of that kind, even if their entries are equal.
            if not (value.own_step and other.place.inside)
            and not (other.own_step and value.place.inside)
        ]
        if not others or ours.trivial:
            continue
        marks = np.stack([other.digest.marks for other in others])
        scale = np.maximum(np.abs(ours.marks), ours.size)
        apart = (np.abs(marks - ours.marks) / scale).max(1)
        order = apart.argsort(kind="stable")[:CANDIDATES_OF_A_VALUE]
        near = [others[i].number for i in order if apart[i] <= within]
        if near:
            proposed[value.number] = near
    return proposed


def _goes_head_by_head(side: Side, other: Side) -> bool:
    """Return whether a side has values shaped like one head of the other."""
    heads = {
        (value.shape[0], *value.shape[2:])
        for value in other.values
        if len(value.shape) == 4 and value.shape[1] > 1
    }
    return any(v.shape in heads and not v.constant for v in side.values)


def _batches(
    values: Sequence[Value], numbers: Sequence[int]
) -> Iterator[list[int]]:
    """Split value numbers into batches whose values fit into memory."""
    ends = accumulate(math.prod(values[number].shape) for number in numbers)
    for _, batch in groupby(
        zip(numbers, ends, strict=True),
        key=lambda pair: pair[1] // NUMBERS_KEPT,
    ):
        yield [number for number, _ in batch]


def _measure(
    left: Side,
    right: Side,
    candidates: Mapping[int, Sequence[int]],
    forced: set[tuple[int, int]],
    found: Matches,
    bounds: tuple[float, float, Exact | None],
) -> None:
    """Compare candidate pairs, and add their differences to `found`."""
    kept = left.keep(candidates)
    coarse = left.coarse | {
        n for n, others in candidates.items() if right.coarse & {*others}
    }
    enough = _tolerances(left, right, kept, coarse, bounds)
    found.tolerance.update(enough)
    by_right: dict[int, list[int]] = {}
    for ours, others in candidates.items():
        for theirs in others:
            by_right.setdefault(theirs, []).append(ours)

    def compare(theirs: int, value: Tensor) -> None:
        mine = plain(value)
        digest = right.values[theirs].digest
        for ours in by_right[theirs]:
            # marks (some entries of a value) only propose a pair, and may be
            # taken from a nearby entry; so allow twice the tolerance
            within = 2 * enough[ours]
            alike = left.values[ours].digest.distance(digest) <= within
            kind, apart = found.far, math.inf
            if alike or (ours, theirs) in forced:
                apart = difference(kept[ours], mine, enough[ours])
                kind = found.equal if apart <= enough[ours] else kind
            if alike and kind is found.far:
                gap = sorted_apart(kept[ours], mine)
                if gap <= enough[ours]:
                    kind, apart = found.permuted, gap
            kind[ours, theirs] = apart

    right.visit(by_right, compare)


def _tolerances(
    left: Side,
    right: Side,
    kept: Mapping[int, Tensor],
    coarse: set[int],
    bounds: tuple[float, float, Exact | None],
) -> dict[int, float]:
    """Return, for each left value, the difference that passes as rounding.

    `coarse` has the numbers of the values that a coarser dtype has rounded.
    `bounds` holds the least and the largest tolerance, as shares of a value's
    size. Its last item is the left's float64 run, or None.
    """
    whole = left.nudgeable or left.only_scores
    units = FLOOR_UNITS if whole else UNNUDGED_UNITS
    times = NUDGE_NOISES
    if left.values[0].place.recorded and not left.only_scores:
        units = RECORDED_UNITS
    least, most, exact = bounds
    eps = max(torch.finfo(left.dtype).eps, torch.finfo(right.dtype).eps)
    if exact:
        units, times = MEASURED_UNITS, MEASURED_NOISES
    if eps > torch.finfo(torch.float32).eps:
        units, times = FLOOR_UNITS_OF_16_BITS, NUDGE_NOISES_OF_16_BITS
        units = MEASURED_UNITS_OF_16_BITS if exact else units
    unit = unit_of(left, right)
    sizes = {number: largest(value) for number, value in kept.items()}
    tolerance = {
        number: size * max(units * eps, OWN_UNITS * unit)
        if number in coarse
        else size * units * eps
        for number, size in sizes.items()
    }

    def add_noise(number: int, value: Tensor) -> None:
        tolerance[number] += times * difference(kept[number], value)

    if exact:
        run, own = exact

        def add_own(number: int, value: Tensor) -> None:
            number = own[number]
            tolerance[number] += times * spread(kept[number], plain(value))

        run.visit([n for n in own if own[n] in kept], add_own)
    elif left.nudgeable:
        left.visit(kept, add_noise, unit / 2)
    return {
        n: min(max(tolerance[n], least * size), most * size)
        for n, size in sizes.items()
    }


def _in_float64(side: Side) -> Exact | None:
    """Run a side again in float64; return None if that is impossible."""
    if not side.nudgeable or side.dtype == torch.float64:
        return None
    try:
        run = Side.run(side.subject, side.tokens, reduce=side.reduce)
    except ValueError:
        return None
    # pair by line, because a line that casts may run in only one dtype
    pairs = pair_lines(run, side, lambda place: place)
    own = {exact.number: value.number for exact, value in pairs}
    own[run.normalised] = side.normalised
    return (run, own) if run.doubled else None


def pair_by_name(
    sides: tuple[Side, Side], table: Iterable[tuple[str, str]]
) -> list[tuple[int, int]]:
    """Return the value numbers for each pair of names in a table.

    A name is that of an array, a module (for its output) or a line. An example
    of a line is "layer 0 model.py:43 ln_1", as in recordings.

    Raises:
        ValueError: if a side lacks a value of that name.
    """
    layers = [v.place.layer or 0 for side in sides for v in side.values]
    found: dict[tuple[int, int], None] = {}
    for names in table:
        each = any(LAYER in name for name in names)
        known = [
            [_numbers(*of, i) for of in zip(sides, names, strict=True)]
            for i in (range(max(layers) + 1) if each else [None])
        ]
        for k, side in enumerate(("left", "right")):
            if not any(both[k] for both in known):
                raise ValueError(
                    f"no value of the {side} is named {names[k]!r}"
                )
        found |= {(a[-1], b[-1]): None for a, b in known if a and b}
    return [*found]


def _numbers(side: Side, name: str, layer: int | None) -> list[int]:
    """Return the numbers of values with this name, in all layers or one."""
    whole = name.replace(LAYER, str(layer))
    return [
        v.number
        for v in side.values
        if whole in (v.place.function, v.place.module, name_of(v.place))
        and not v.place.inside
        and (layer is None or LAYER in name or v.place.layer == layer)
    ]


def pair_lines(
    left: Side, right: Side, name: Callable[[Place], Hashable]
) -> Iterator[tuple[Value, Value]]:
    """Yield pairs of values on lines that both sides run equally often."""
    found: tuple[dict[Hashable, list[Value]], ...] = ({}, {})
    for lines, side in zip(found, (left, right), strict=True):
        for value in side.values:
            lines.setdefault(name(value.place), []).append(value)
    for line, values in found[0].items():
        others = found[1].get(line, [])
        if len(values) == len(others):
            yield from zip(values, others, strict=True)
