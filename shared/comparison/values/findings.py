"""Makes the result of a diff by value from two sides and their matches."""

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch

from ...running.tolerances import (
    FINE_UNIT,
    FLOORS_IN_DOUBT,
    RECORDED_UNITS,
    UNNUDGED_UNITS,
)
from ...tracing.value import NAMES, Value
from ...validation import dtype_name
from .divergence import find_divergence
from .flow import LIKENESS_SHARE, Flow
from .layouts import largest, nearest_layout
from .matching import (
    Matches,
    Sides,
    as_sides,
    match,
    pair_by_name,
    pair_lines,
)
from .recording import Recording, name_of, out_of_order
from .rows import MOVED, Row
from .scope import Scope
from .side import Side, unit_of
from .value_diff import ValueDiff

OPEN_SHARE = 0.5  # of a recording's arrays may have no counterpart
NEAREST = 5  # values that are offered where nothing is shared


def findings(
    names: tuple[str, str],
    sides: tuple[Side, Side],
    named: Sequence[tuple[str, str]],
    tolerance: float,
) -> ValueDiff:
    """Return the result: what pairs, what is alone, and where they part.

    Named are the names of values that a table pairs; the tolerance is a share
    of a value's largest number that always passes.
    """
    left, right = sides
    matches = match(left, right, tolerance, pair_by_name(sides, named))
    layers = {v.place.layer for side in sides for v in side.values}
    equal = matches.apart <= matches.rounding
    close = as_sides(matches.near)
    doubts = _doubts(sides, matches) if equal else close
    for found, more in zip(doubts, as_sides(matches.parted), strict=True):
        found.update(more)
    same = equal and not any(doubts)
    pairs = [
        Row(
            a.place,
            b.place,
            a.shape,
            apart,
            MOVED if two in matches.permuted else "",
            two,
        )
        for two, apart in sorted(matches.pairs.items())
        for a, b in [(left.values[two[0]], right.values[two[1]])]
        # the inside of an operation, on both sides: no line of either
        if not a.place.inside or not b.place.inside
    ]
    ours, theirs = (Flow(sides, i, matches, doubts[i]) for i in (0, 1))
    alone = {
        "left": [
            Row(value.place, None, value.shape, None, why, (value.number, -1))
            for value, why in ours.lines_alone(theirs)
        ],
        "right": [
            Row(None, value.place, value.shape, None, why, (-1, value.number))
            for value, why in theirs.lines_alone(ours)
        ],
    }
    only_scores = any(side.only_scores for side in sides)
    parted = None if same else find_divergence(sides, (ours, theirs), matches)
    return ValueDiff(
        names=names,
        sides=sides,
        layers=frozenset(layer for layer in layers if layer is not None),
        only_scores=only_scores,
        pairs=pairs,
        alone={side: [] for side in alone} if only_scores else alone,
        parted=parted,
        nearest=[] if pairs else _nearest(left, right),
        notes=[*_notes(names, sides, pairs)],
        counts=[
            (len(_unmatched(side, known)), len(_countable(side)))
            for side, known in zip(sides, matches.explaining, strict=True)
        ],
        apart=matches.apart,
        rounding=matches.rounding,
        scored=left.scored and right.scored,
        coarse=_coarse(sides, matches.apart) if same else "",
        scope=_scope(right),
    )


def _scope(right: Side) -> Scope:
    """Return what one run of two sides compares."""
    recorded = isinstance(right, Recording) and not right.of_a_function
    rows, length = right.tokens.shape
    return Scope(rows, length, recorded)


def _coarse(sides: tuple[Side, Side], apart: float) -> str:
    """Return which line makes two functions equal only in a coarser dtype."""
    kind = sides[0].dtype
    eps = torch.finfo(kind).eps
    if isinstance(sides[1], Recording) and torch.finfo(kind).bits == 16:
        return (
            f" as far as {dtype_name(kind)} tells: it cannot tell exact "
            f"GELU from tanh's, nor an eps of 1e-6 from 1e-5"
        )
    coarser = [
        (torch.finfo(dtype).eps, side, dtype)
        for side in sides
        for dtype in side.dtypes
        if torch.finfo(dtype).eps > eps
    ]
    if apart <= UNNUDGED_UNITS * eps or not coarser:
        return ""
    _, side, dtype = max(coarser, key=itemgetter(0))
    place, single = side.dtypes[dtype]
    name = dtype_name(dtype)
    words = f"is a {name} constant" if single else f"computes in {name}"
    return f" up to {name}: {place} {words}"


def _notes(
    names: tuple[str, str],
    sides: tuple[Side, Side],
    pairs: Sequence[Row],
) -> Iterator[str]:
    left, right = sides
    kind = dtype_name(left.dtype)
    for name, side in zip(names, sides, strict=True):
        if side.scripted:
            parts = ", ".join(side.scripted[:3])
            yield (
                f"{name}: {parts} is scripted; its values are recorded, its "
                f"lines are not seen"
            )
        if side.single:
            own = dtype_name(side.dtype)
            yield f"{name} does not run in float64: both ran in {own}"
        if isinstance(right, Recording) and side.only_scores:
            yield (
                f"{name} is {side.written}, and its scores alone are "
                f"compared; to compare its lines, save its arrays in the "
                f"order in which they are computed, "
                f"numpy.savez('arrays.npz', **arrays), and name arrays.npz as "
                f"this side"
            )
    if not isinstance(right, Recording):
        return
    if isinstance(left, Recording) and not left.only_scores:
        units = RECORDED_UNITS
        yield f"{units} units of rounding of {kind} pass, unmeasured"
    else:
        yield f"run in {kind}, that of {names[1]}"
    if right.reduce is not None:
        yield f"compared by {NAMES} alone, which no order of numbers changes"
    if late := out_of_order(pairs, left.values):
        yield (
            f"{late[1]} is computed before {late[0]} and stands behind it in "
            f"{names[1]}: arrays are meant in the order of computation"
        )


def _nearest(left: Side, right: Side) -> list[Row]:
    """Return for lines of the left the nearest of the right, by digests."""
    found: dict[tuple[str, int], tuple[float, Row]] = {}
    for a in left.values:
        for b in right.values:
            if a.digest.trivial or a.place.inside or b.place.inside:
                continue
            apart = a.digest.distance(b.digest)
            line, size = (a.place.path, a.place.line), apart / a.digest.size
            if size < found.get(line, (math.inf,))[0]:
                found[line] = size, Row(a.place, b.place, a.shape, apart)
    nearest = sorted(found.values(), key=itemgetter(0))[:NEAREST]
    return [pair for _, pair in nearest]


def _unmatched(side: Side, known: set[int]) -> list[Value]:
    """Return the values of a side, or its arrays, without a counterpart."""
    return [v for v in _countable(side) if v.number not in known]


def _countable(side: Side) -> list[Value]:
    """Return the values whose counterpart can be recognised."""
    return [v for v in side.values if not (v.digest.trivial or v.place.inside)]


def _doubts(sides: tuple[Side, Side], matches: Matches) -> Sides:
    """Return the numbers of values that differ by more than rounding.

    Each side has them almost, no multiple of them; or one line computes
    them on both. Of a recording all without a counterpart, where these are
    most, and without scores those behind the last with one. None where
    rounding is so fine that the scores decide.
    """
    left, right = sides
    known = matches.explaining
    doubts: Sides = set(), set()
    alone = _unmatched(left, known[0]), _unmatched(right, known[1])
    scored = left.scored and right.scored
    if not scored:
        last = max(known[1], default=-1)
        doubts[1].update(v.number for v in alone[1] if v.number > last)
    fine = scored and unit_of(left, right) < FINE_UNIT
    if right.only_scores or fine:
        return doubts
    arrays = _countable(right)
    most = OPEN_SHARE * len(arrays)
    if arrays[0].place.recorded and len(alone[1]) > most:
        doubts[1].update(v.number for v in alone[1])
    ours, theirs = ({v.number for v in values} for values in alone)
    lines = [  # without a counterpart, though one line computes them
        (a.number, b.number)
        for a, b in pair_lines(*sides, lambda p: (name_of(p), p.inside))
        if a.shape == b.shape and a.number in ours and b.number in theirs
    ]
    pairs = sorted({*matches.near, *lines})
    kept = [
        side.keep(numbers) if numbers else {}
        for side, numbers in zip(sides, as_sides(pairs), strict=True)
    ]
    for n, r in pairs:
        mine = kept[0][n]
        value, gap = nearest_layout(kept[1][r], mine, 0.0)
        inside = left.values[n].place.inside or right.values[r].place.inside
        near = gap <= LIKENESS_SHARE * left.values[n].digest.size
        like = near and not inside
        if not like and (n, r) not in lines:
            continue
        factor = float((value * mine).sum() / mine.square().sum())
        rest = largest(value - factor * mine)
        if not rest <= FLOORS_IN_DOUBT * matches.tolerance.get(n, 0.0):
            doubts[0].add(n)
            doubts[1].add(r)
    return doubts
