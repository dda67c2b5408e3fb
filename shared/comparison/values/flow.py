"""Find which values of a model the other model explains: see `Flow`."""

import math
from collections.abc import Collection, Iterator, Sequence

from ...running.places import Place
from ...running.tolerances import FACTOR_SHARE
from ...tracing.fused_steps import OPTIONAL
from ...tracing.value import HEAD, Value
from .matching import Matches
from .rows import NOWHERE
from .side import Side

AHEAD = 24  # most values of one module call to compare
# values that differ by less than this share of their size count as similar
LIKENESS_SHARE = 0.25
STARTS = 3  # most unexplained lines to compare on each side, and to show

SUMS = {"+", "+="}

# Operations that only rearrange entries of their input.
MOVES = {
    *("view", "reshape", "permute", "transpose", "expand", "repeat", "flip"),
    *("repeat_interleave", "chunk", "split", "split_with_sizes", "unbind"),
    *("cat", "stack", "roll", "gather", "index_select", "clone", "copy_"),
    *("contiguous", "unflatten", "flatten", "view_as_real", "complex", "tile"),
    *("view_as_complex", "constant_pad_nd", "pad", "unfold", "[]", "[]="),
    *("repeat_kv", "expand_as", "hstack", "concat", "concatenate"),
}


class Flow:
    """The values of a model, and which of them the other model explains.

    A value is explained if the other side has its entries, in any order. It
    is also explained if it is only a step towards such a value. The result of
    an operation that only moves entries is explained if its inputs are. So is
    a constant, unless the other side has a similar constant. A value that the
    other side has only approximately is not explained, because small weights
    may hide a fault.

    To explain more values, add to `explained` in `__init__`. `open` has the
    values that are not explained.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        i: int,
        matches: Matches,
        close: set[int],
    ):
        """Find the explained values of side i; `close` has those in doubt."""
        side, others = sides[i], sides[1 - i].values
        known = matches.known_on[i]
        self.values = side.values
        self.partner = {two[i]: two[1 - i] for two in matches.pairs}
        self.differences = {
            two[i]: apart
            for two, apart in matches.pairs.items()
            if two in matches.equal
        }
        heads = [v for v in self.values if HEAD.search(v.place.inside)]
        unseen = {v.inputs for v in heads if v.number not in known}
        # a head is known only if all heads of its value are, because one head
        # may equal the features of one position
        self.known = known - {v.number for v in heads if v.inputs in unseen}
        self.used = {side.normalised}
        for value in reversed(self.values):
            if value.number in self.used:
                self.used.update(value.inputs)
        self.recorded = self.values[side.last].place.recorded
        if self.recorded:  # a file lists no inputs, so all values are used
            self.used = {value.number for value in self.values}
        # the heads of a used value are also used
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
        """Return the first open values: those whose inputs are explained.

        For a file, prefer values whose number is above `behind`.
        """
        found = [v for v in self.open if self.explained.issuperset(v.inputs)]
        # the terms of an open sum are no starts, because the other side may
        # add them in another order
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
        """Return `start`, then the open values its call makes from it."""
        reached = {start.number: start}
        for value in self.open:
            if value.call == start.call and reached.keys() & value.inputs:
                reached[value.number] = value
        return [reached[number] for number in sorted(reached)][:AHEAD]

    def made_of(self, value: Value) -> int:
        """Return the last counterpart's number among sources, or -1."""
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
        """Return how far a value's inputs are from the other side's inputs.

        Return None if the value has no inputs, or if the other side does not
        have all of them in the same order.
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
        """Yield the lines that rearranged a value's inputs, nearest first."""
        before = [*self.moved_before(value)]
        yield from (v.place for v in before)
        for later in (*reversed(before), value):
            yield from reversed(later.moves)

    def moved_before(
        self, value: Value, but: Collection[int] = ()
    ) -> Iterator[Value]:
        """Yield the values before a value that only rearrange entries.

        The nearest comes first. The search stops at values whose numbers are
        in `but`.
        """
        for number in reversed(value.inputs):
            before = self.values[number]
            if moves(before) and number not in but:
                yield before
                yield from self.moved_before(before, but)

    def times(self, value: Value) -> int:
        """Return how often a value repeats the entries of its input."""
        of = self.values[value.inputs[0]].shape
        return math.prod(value.shape) // math.prod(of)

    def parts_before(self, value: Value) -> Iterator[Value]:
        """Yield slices that lead to a value and have no counterpart.

        The other side computes the values that are cut, but not these slices.
        """
        plain = {v.number for v in self.values if v.constant}
        plain |= {v.number for v in self.values if v.digest.trivial}
        for before in self.moved_before(value, plain | self.known):
            if self.known.issuperset(before.inputs) and self.cuts(before):
                yield before

    def cuts(self, value: Value) -> bool:
        """Return whether a value is only a part of its single input."""
        return len(value.inputs) == 1 and self.times(value) == 0

    def lines_alone(self, other: "Flow") -> Iterator[tuple[Value, str]]:
        """Yield each unpaired value, and in words what is known about it.

        Steps inside an operation are left out, because they have no line.
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
            return "not used by the scores"
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
        """Return the numbers of matched values and all that lead to them."""
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
            # a value that leads to a known result counts as known
            some = found & others.get(number, set())
            if some or (number in parts and found >= parts[number]):
                found.add(number)
        return found


def moves(value: Value) -> bool:
    """Return whether a value only rearranges entries of its input."""
    return value.view or value.place.op in MOVES


def _near_a_constant(value: Value, others: Sequence[Value]) -> bool:
    """Return whether the other side has a nearly equal constant."""
    ours = value.digest
    return not ours.trivial and any(
        theirs.constant
        and not theirs.digest.trivial
        and ours.distance(theirs.digest) <= LIKENESS_SHARE * ours.size
        for theirs in others
    )


def _in_words(scale: float) -> str:
    """Return a factor in words; as a root if it is the root of a width."""
    width = round(max(scale, 1 / scale) ** 2)
    near = abs(max(scale, 1 / scale) ** 2 - width) < FACTOR_SHARE * width
    if 1e-3 < scale < 1e3 and near and math.isqrt(width) ** 2 != width:
        return f"\u221a{width}" if scale > 1 else f"1/\u221a{width}"
    return f"{scale:.4g}"
