"""Values that rounding does not explain, where it explains the scores."""

from .flow import ALIKE
from .layouts import largest, nearest_layout
from .matching import Matches, Sides, as_sides
from .naming import pair_lines
from .recording import name_of
from .side import Side, unit_of
from .value import Value

FINE = 2.0**-40  # units of rounding below hide nothing
MOST = 0.5  # of a recording's arrays may have no counterpart
DOUBTED = 1.5  # times what passes as rounding


def unmatched(side: Side, known: set[int]) -> list[Value]:
    """Return the values of a side, or its arrays, without a counterpart."""
    return [v for v in countable(side) if v.number not in known]


def countable(side: Side) -> list[Value]:
    """Return the values that a counterpart can be told of."""
    return [v for v in side.values if not (v.digest.trivial or v.place.inside)]


def find_doubts(sides: tuple[Side, Side], matches: Matches) -> Sides:
    """Return the numbers of values that differ by more than rounding.

    Each side has them almost, no multiple of them; or one line computes
    them on both. Of a recording all without a counterpart, where these are
    most, and without scores those behind the last with one. None where
    rounding is so fine that the scores decide.
    """
    left, right = sides
    known = matches.explaining
    doubts: Sides = set(), set()
    alone = unmatched(left, known[0]), unmatched(right, known[1])
    scored = left.scored and right.scored
    if not scored:
        last = max(known[1], default=-1)
        doubts[1].update(v.number for v in alone[1] if v.number > last)
    fine = scored and unit_of(left, right) < FINE
    if right.only_scores or fine:
        return doubts
    arrays = countable(right)
    if arrays[0].place.recorded and len(alone[1]) > MOST * len(arrays):
        doubts[1].update(v.number for v in alone[1])
    lines = _same_lines(sides, alone)
    pairs = sorted({*matches.near, *lines})
    ours, theirs = (
        side.keep(numbers) if numbers else {}
        for side, numbers in zip(sides, as_sides(pairs), strict=True)
    )
    for n, r in pairs:
        value, gap = nearest_layout(theirs[r], ours[n], 0.0)
        inside = left.values[n].place.inside or right.values[r].place.inside
        like = gap <= ALIKE * left.values[n].digest.size and not inside
        if not like and (n, r) not in lines:
            continue
        factor = float((value * ours[n]).sum() / ours[n].square().sum())
        rest = largest(value - factor * ours[n])
        if not rest <= DOUBTED * matches.tolerance.get(n, 0.0):
            doubts[0].add(n)
            doubts[1].add(r)
    return doubts


def _same_lines(
    sides: tuple[Side, Side], alone: tuple[list[Value], list[Value]]
) -> list[tuple[int, int]]:
    """Return pairs without counterparts that one line computes."""
    ours, theirs = ({v.number for v in values} for values in alone)
    return [
        (a.number, b.number)
        for a, b in pair_lines(*sides, lambda p: (name_of(p), p.inside))
        if a.shape == b.shape and a.number in ours and b.number in theirs
    ]
