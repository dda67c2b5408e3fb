"""What of a model the other one explains."""

import math
from collections.abc import Collection, Iterator, Sequence

from ...running.places import Place
from ...running.tolerances import FACTOR_SHARE
from ...tracing.fused_steps import OPTIONAL
from ...tracing.value import HEAD, Value
from .matching import Matches
from .rows import NOWHERE
from .side import Side

AHEAD = 24  # values of a call that are looked at for the nearest
LIKENESS_SHARE = 0.25  # of a value's size: two as close are one thing
STARTS = 3  # open lines that are looked at on each side, and shown

SUMS = {"+", "+="}

# Operations whose result has only numbers of their input.
MOVES = {
    *("view", "reshape", "permute", "transpose", "expand", "repeat", "flip"),
    *("repeat_interleave", "chunk", "split", "split_with_sizes", "unbind"),
    *("cat", "stack", "roll", "gather", "index_select", "clone", "copy_"),
    *("contiguous", "unflatten", "flatten", "view_as_real", "complex", "tile"),
    *("view_as_complex", "constant_pad_nd", "pad", "unfold", "[]", "[]="),
    *("repeat_kv", "expand_as", "hstack", "concat", "concatenate"),
}


class Flow:
    """What leads to a model's scores, and how far it is explained.

    A value is explained where the other side has it, in any order, or has
    something that is computed from it: a step of its own on the way to a
    common value. An operation that only moves explained values is explained,
    and a constant, unless the other side has one near it. A part of a value
    explains the whole once all parts in use are explained. A value that the
    other side has almost is not: small weights behind it may hide a fault.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        i: int,
        matches: Matches,
        close: set[int],
    ):
        """Follow the values of one side; i is its index."""
        side, others = sides[i], sides[1 - i].values
        known = matches.explaining[i]
        self.values = side.values
        self.partner = {two[i]: two[1 - i] for two in matches.pairs}
        self.differences = {
            two[i]: apart
            for two, apart in matches.pairs.items()
            if two in matches.equal
        }
        heads = [v for v in self.values if HEAD.search(v.place.inside)]
        unseen = {v.inputs for v in heads if v.number not in known}
        # one head says little of the others: perhaps it is a position
        self.known = known - {v.number for v in heads if v.inputs in unseen}
        self.used = {side.normalised}
        for value in reversed(self.values):
            if value.number in self.used:
                self.used.update(value.inputs)
        self.recorded = self.values[side.last].place.recorded
        if self.recorded:  # a file says not what is made of what
            self.used = {value.number for value in self.values}
        # the heads go with the whole
        self.used |= {
            v.number for v in heads if self.used.issuperset(v.inputs)
        }
        self.explained = self._backwards() - close | self.known
        for value in self.values:
            moved = moves(value) and value.inputs
            plain = value.constant and not _near_a_constant(value, others)
            given = self.explained.issuperset(value.inputs)
            if given and (moved or plain):
                self.explained.add(value.number)
        self.explained |= {
            v.number for v in heads if self.explained.issuperset(v.inputs)
        }
        self.open = [
            value
            for value in self.values
            if value.number in self.used - self.explained
            and value.place.inside not in OPTIONAL
        ]

    def starts(self, behind: int = -1) -> list[Value]:
        """Return the open values whose inputs are explained: the first.

        Of a file those behind a number, if there are any.
        """
        found = [v for v in self.open if self.explained.issuperset(v.inputs)]
        # a part of a sum that is open elsewhere may be added in another order
        numbers = {v.number for v in self.open}
        parts = {
            n
            for v in self.open
            if v.place.op in SUMS and len(numbers.intersection(v.inputs)) > 1
            for n in v.inputs
            if self.values[n].place.op in SUMS
        }
        found = [v for v in found if v.number not in parts] or found
        if self.recorded:
            found = [v for v in found if not v.digest.trivial]
            late = [v for v in found if v.number > behind]
            return (late or found)[:AHEAD] or [self.values[-1]]
        return found[:STARTS] or self.open[:1] or [self.values[-1]]

    def same_call(self, start: Value) -> list[Value]:
        """Return what the same call of a function goes on to compute.

        Only what is computed from the value and is not explained.
        """
        reached = {start.number: start}
        for value in self.open:
            if value.call == start.call and reached.keys() & value.inputs:
                reached[value.number] = value
        return [reached[number] for number in sorted(reached)][:AHEAD]

    def made_of(self, value: Value) -> int:
        """Return the last partner of what a value is computed from, or -1."""
        reached, last = {*value.inputs}, -1
        for before in reversed(self.values[: value.number]):
            number = before.number
            if number not in reached:
                continue
            if number in self.partner and not before.constant:
                last = max(last, self.partner[number])
            else:
                reached.update(before.inputs)
        return last

    def inputs_apart(self, value: Value) -> float | None:
        """Return how far a value's inputs are from the other side's.

        None where one of them is not there in the same order, or where
        there are none.
        """
        apart = []
        for number in value.inputs:
            before = self.values[number]
            if number in self.differences:
                apart.append(self.differences[number])
            elif moves(before):
                further = self.inputs_apart(before)
                if further is None:
                    return None
                apart.append(further)
            elif not before.digest.trivial:
                return None
        return max(apart, default=None)

    def moves_to(self, value: Value) -> Iterator[Place]:
        """Yield the lines that laid a value's inputs out, nearest first."""
        before = [*self.moved_before(value)]
        yield from (v.place for v in before)
        for later in (*reversed(before), value):
            yield from reversed(later.moves)

    def moved_before(
        self, value: Value, but: Collection[int] = ()
    ) -> Iterator[Value]:
        """Yield what only moves numbers on the way to a value.

        The nearest first; nothing behind one of some numbers.
        """
        for number in reversed(value.inputs):
            before = self.values[number]
            if moves(before) and number not in but:
                yield before
                yield from self.moved_before(before, but)

    def times(self, value: Value) -> int:
        """Return how often what moves numbers holds those of its input."""
        of = self.values[value.inputs[0]].shape
        return math.prod(value.shape) // math.prod(of)

    def parts_before(self, value: Value) -> Iterator[Value]:
        """Yield parts without a counterpart on the way to a value.

        The other side computes the whole values, and not these parts.
        """
        plain = {v.number for v in self.values if v.constant}
        plain |= {v.number for v in self.values if v.digest.trivial}
        for before in self.moved_before(value, plain | self.known):
            if self.known.issuperset(before.inputs) and self.cuts(before):
                yield before

    def cuts(self, value: Value) -> bool:
        """Whether a value that is moved is a part of its one input."""
        return len(value.inputs) == 1 and self.times(value) == 0

    def lines_alone(self, other: "Flow") -> Iterator[tuple[Value, str]]:
        """Yield the values that are in no pair, and what is known of each.

        Not the steps of an operation that no line takes by itself.
        """
        for value in self.values:
            paired = value.number in self.differences
            inside = value.place.inside and value.number not in self.known
            if not (paired or inside or value.digest.trivial):
                yield value, self._why_alone(value, other)

    def _why_alone(self, value: Value, other: "Flow") -> str:
        if value.number in self.known:
            return "same value again"
        for theirs in other.values:
            scale = theirs.digest.scale_of(value.digest)
            if scale is not None and abs(scale - 1) > FACTOR_SHARE:
                of = f"{theirs.place} times {_in_words(scale)}"
                return f"equals a result of {of}"
        if value.number not in self.used:
            return "no part of the scores"
        if value.number not in self.explained:
            return NOWHERE
        reached = {value.number}
        for later in self.values[value.number + 1 :]:
            if reached.intersection(later.inputs):
                reached.add(later.number)
                if later.number in self.known:
                    return f"on the way to {later.place}"
        return ""

    def _backwards(self) -> set[int]:
        """Return the known numbers, and those that lead to them."""
        parts: dict[int, set[int]] = {}
        others: dict[int, set[int]] = {}
        for value in self.values:
            for number in value.inputs if value.number in self.used else ():
                whole = math.prod(self.values[number].shape)
                part = value.view and math.prod(value.shape) < whole
                users = parts if part else others
                users.setdefault(number, set()).add(value.number)
        found = set(self.known)
        for number in reversed(range(len(self.values))):
            # the parts of a product are known with the product
            some = found & others.get(number, set())
            if some or (number in parts and found >= parts[number]):
                found.add(number)
        return found


def moves(value: Value) -> bool:
    """Whether a value has only numbers of its input."""
    return value.view or value.place.op in MOVES


def _near_a_constant(value: Value, others: Sequence[Value]) -> bool:
    """Whether the other side has nearly the same table."""
    ours = value.digest
    return not ours.trivial and any(
        theirs.constant
        and not theirs.digest.trivial
        and ours.distance(theirs.digest) <= LIKENESS_SHARE * ours.size
        for theirs in others
    )


def _in_words(scale: float) -> str:
    """Return a factor, as a root where it may be that of a width."""
    width = round(max(scale, 1 / scale) ** 2)
    near = abs(max(scale, 1 / scale) ** 2 - width) < FACTOR_SHARE * width
    if 1e-3 < scale < 1e3 and near and math.isqrt(width) ** 2 != width:
        return f"\u221a{width}" if scale > 1 else f"1/\u221a{width}"
    return f"{scale:.4g}"
