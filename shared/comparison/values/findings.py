"""Make the result of a diff from two recorded runs and their matches."""

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
    pair_lines,
)
from .recording import Recording, name_of, out_of_order
from .rows import MOVED, Row
from .scope import Scope
from .side import Side, unit_of
from .value_diff import ValueDiff

OPEN_SHARE = 0.5  # largest share of a recording's arrays that may be unpaired
NEAREST = 5  # most similar lines to show if the sides have no value in common


def findings(
    names: tuple[str, str],
    sides: tuple[Side, Side],
    named: Sequence[tuple[str, str]],
    tolerance: float,
) -> ValueDiff:
    """Return the result: paired and unpaired lines, and the first difference.

    `named` has the pairs of names from the user's table. A difference always
    passes if it is at most `tolerance` times a value's largest entry.
    """
    left, right = sides
    matches = match(left, right, tolerance, named)
    layers = {v.place.layer for side in sides for v in side.values}
    equal = matches.apart <= matches.rounding
    close = as_sides(matches.near)
    doubts = _doubts(sides, matches) if equal else close
    for found, more in zip(doubts, as_sides(matches.named_apart), strict=True):
        found.update(more)
    same = equal and not any(doubts)
    pairs = [*_paired_rows(sides, matches)]
    ours, theirs = (Flow(sides, i, matches, doubts[i]) for i in (0, 1))
    only_scores = any(side.only_scores for side in sides)
    parted = None if same else find_divergence(sides, (ours, theirs), matches)
    return ValueDiff(
        names=names,
        sides=sides,
        layers=frozenset(layer for layer in layers if layer is not None),
        only_scores=only_scores,
        pairs=pairs,
        alone={"left": [], "right": []}
        if only_scores
        else _rows_alone(ours, theirs),
        parted=parted,
        nearest=[] if pairs else _nearest(left, right),
        notes=[*_notes(names, sides, pairs)],
        counts=[
            (len(_unmatched(side, known)), len(_countable(side)))
            for side, known in zip(sides, matches.known_on, strict=True)
        ],
        apart=matches.apart,
        rounding=matches.rounding,
        scored=left.scored and right.scored,
        coarse=_coarse(sides, matches.apart) if same else "",
        scope=_scope(right),
    )


def _paired_rows(sides: tuple[Side, Side], matches: Matches) -> Iterator[Row]:
    """Yield the pairs of lines, in the order of the left side's run."""
    left, right = sides
    for two, apart in sorted(matches.pairs.items()):
        a, b = left.values[two[0]], right.values[two[1]]
        if a.place.inside and b.place.inside:
            continue  # both are steps inside operations: they have no line
        why = MOVED if two in matches.permuted else ""
        yield Row(a.place, b.place, a.shape, apart, why, two)


def _rows_alone(ours: Flow, theirs: Flow) -> dict[str, list[Row]]:
    """Return each side's lines without a counterpart."""
    return {
        "left": [
            Row(value.place, None, value.shape, None, why, (value.number, -1))
            for value, why in ours.lines_alone(theirs)
        ],
        "right": [
            Row(None, value.place, value.shape, None, why, (-1, value.number))
            for value, why in theirs.lines_alone(ours)
        ],
    }


def _scope(right: Side) -> Scope:
    """Return the scope (what was compared) of one run of two sides."""
    recorded = isinstance(right, Recording) and not right.of_a_function
    rows, length = right.tokens.shape
    return Scope(rows, length, recorded)


def _coarse(sides: tuple[Side, Side], apart: float) -> str:
    """Return words on a dtype that makes the comparison coarser, or ""."""
    kind = sides[0].dtype
    eps = torch.finfo(kind).eps
    if isinstance(sides[1], Recording) and torch.finfo(kind).bits == 16:
        return (
            f" as far as {dtype_name(kind)} tells: it cannot distinguish "
            f"exact GELU from tanh's, nor an eps of 1e-6 from 1e-5"
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
                f"{name}: {parts} is scripted; its values are recorded, but "
                f"not its lines"
            )
        if side.single:
            own = dtype_name(side.dtype)
            scarce = side.subject.builder.scarce
            why = f": {scarce}" if scarce else " does not run in float64"
            yield f"{name}{why}: both ran in {own}"
        if isinstance(right, Recording) and side.only_scores:
            yield (
                f"{name} is {side.written}: only its scores are compared; to "
                f"compare its lines, save its arrays in the order in which "
                f"they are computed, numpy.savez('arrays.npz', **arrays), "
                f"and give arrays.npz as this side"
            )
    if not isinstance(right, Recording):
        return
    if isinstance(left, Recording) and not left.only_scores:
        units = RECORDED_UNITS
        yield f"allowed {units} units of rounding of {kind}, not measured"
    else:
        yield f"run in {kind}, the dtype of {names[1]}"
    if right.reduce is not None:
        yield f"compared only by {NAMES}, which ignore the order of numbers"
    if late := out_of_order(pairs, left.values):
        yield (
            f"{late[1]} is computed before {late[0]} and comes after it in "
            f"{names[1]}: give arrays in the order of computation"
        )


def _nearest(left: Side, right: Side) -> list[Row]:
    """Return the most similar lines of both sides, by their digests."""
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
    """Return the values (or arrays) of a side that have no counterpart."""
    return [v for v in _countable(side) if v.number not in known]


def _countable(side: Side) -> list[Value]:
    """Return values that are distinctive enough to have a counterpart."""
    return [v for v in side.values if not (v.digest.trivial or v.place.inside)]


def _doubts(sides: tuple[Side, Side], matches: Matches) -> Sides:
    """Return the numbers of the values that differ by more than rounding.

    If the scores decide, as in float64, no value is in doubt. An exception is
    a recording without scores.
    """
    left, right = sides
    scored = left.scored and right.scored
    fine = scored and unit_of(left, right) < FINE_UNIT
    decided = right.only_scores or fine
    missing = set() if scored else _after_the_last(right, matches)
    if decided:
        return set(), missing
    missing |= _mostly_missing(right, matches)
    apart = _nearly_equal(sides, matches)
    return {n for n, _ in apart}, missing | {r for _, r in apart}


def _after_the_last(right: Side, matches: Matches) -> set[int]:
    """Return the values after the last value with a counterpart."""
    known = matches.known_on[1]
    last = max(known, default=-1)
    return {v.number for v in _unmatched(right, known) if v.number > last}


def _mostly_missing(right: Side, matches: Matches) -> set[int]:
    """Return the arrays without a counterpart, if they are the majority."""
    arrays = _countable(right)
    alone = {v.number for v in _unmatched(right, matches.known_on[1])}
    most = OPEN_SHARE * len(arrays)
    return alone if arrays[0].place.recorded and len(alone) > most else set()


def _nearly_equal(
    sides: tuple[Side, Side], matches: Matches
) -> set[tuple[int, int]]:
    """Return pairs of values that correspond, but are not multiples.

    Two values correspond if they are almost equal. They also do if the same
    line computes them, and neither has a counterpart.
    """
    left, right = sides
    ours, theirs = (
        {v.number for v in _unmatched(side, known)}
        for side, known in zip(sides, matches.known_on, strict=True)
    )
    lines = [  # pairs of unpaired values on lines that both sides run
        (a.number, b.number)
        for a, b in pair_lines(*sides, lambda p: (name_of(p), p.inside))
        if a.shape == b.shape and a.number in ours and b.number in theirs
    ]
    pairs = sorted({*matches.near, *lines})
    kept = [
        side.keep(numbers) if numbers else {}
        for side, numbers in zip(sides, as_sides(pairs), strict=True)
    ]
    found = set()
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
            found.add((n, r))
    return found
