"""The first line of a model that the other one does not explain."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from ...tracing.value import HEAD, SAME_SHAPE, Value
from .flow import ALIKE, STARTS, Flow
from .layouts import difference, nearest_layout
from .matching import Matches
from .rows import Divergence
from .side import Side

CLOSE = 1e-5  # relative: a factor so close to a root is that root
FAR = 2.0  # of a value's size: two so far apart have nothing in common
MOST_HEADS, MOST_MARKS = 128, 256  # of a value that repeats heads
WIDE = 96  # values of the left that are looked at beside a recording
FEW = 8  # the same beside statistics, where all are of one size
MEASURED = 4  # values of the left that are measured against one of the right


def find_divergence(
    sides: tuple[Side, Side], flows: tuple[Flow, Flow], matches: Matches
) -> Divergence:
    """Find the first lines that part, in two models that do."""
    ours, theirs = flows
    lines: set[tuple[object, object]] = {
        (_line(ours.values[n]), _line(theirs.values[r]))
        for n, r in matches.pairs
    }
    chains = [[ours.same_call(v) for v in ours.starts()]]
    # an array in front of those that the left parts from is a step of its own
    behind = min(ours.made_of(chain[0]) for chain in chains[0])
    chains += [[theirs.same_call(v) for v in theirs.starts(behind)]]
    if theirs.recorded:  # few arrays: a later value may stand beside one
        most = WIDE if sides[1].reduce is None else FEW
        chains[0] = [ours.open[:most] or chains[0][0]]
    named = {r: n for n, r in matches.parted}
    partner = theirs.partner | named
    starts = [chain[0] for chain in chains[1]]
    repeats = {
        start.number: [
            v
            for v in theirs.moved_before(start)
            if v.number in partner and len(v.inputs) == 1
            if theirs.times(v) > 1
        ]
        for start in starts
    }
    before = {r for start in starts for r in start.inputs}
    before |= {v.number for found in repeats.values() for v in found}
    sources = {partner[r] for r in before if r in partner}
    kept = [
        side.keep(more.union(*([v.number for v in c] for c in chain)))
        for side, chain, more in zip(
            sides, chains, (sources | {*named.values()}, before), strict=True
        )
    ]
    fits: list[Fit] = []
    own = [value for chain in chains[0] for value in chain]
    for start, chain in zip(starts, chains[1], strict=True):
        near = _nearest_of(start, own, kept) if theirs.recorded else []
        found = near[:1] or [
            _comparable((its, chain), kept, lines) for its in chains[0]
        ]
        if start.number in named:
            origin = ours.values[named[start.number]]
            gap = matches.parted[origin.number, start.number]
            found = [Fit(origin, start, gap, 0)]
        fits.append(min(found, key=attrgetter("rank")))
    # stable: the first of a rank is first, in a file the first with any
    fits.sort(key=lambda fit: fit.rank == 2 if theirs.recorded else fit.rank)
    best = _computed_first(fits, own) if theirs.recorded else fits[0]
    chain = next(c for c in chains[1] if best.theirs in c)
    start = chain[0]
    left, right = (
        flow.values[v.inputs[0]] if HEAD.search(v.place.inside) else v
        for flow, v in zip(flows, (best.ours, best.theirs), strict=True)
    )
    # a step that the right leaves out would stand behind one of these
    omitted = [
        theirs.values[ours.partner[number]].place
        for chain in chains[0]
        for number in reversed(chain[0].inputs)
        if number in ours.partner
    ]
    moves = [*theirs.moves_to(right), *theirs.moves_to(start)]
    shown = [right.place, *omitted[:1], *moves[:1]]
    shown += [v.place for v in (*(f.theirs for f in fits), *chain)]
    shown += [*moves, *omitted]
    factor = _factor(best.ours, best.theirs, kept)
    for number in start.inputs if factor is None else ():
        origin = ours.values[partner.get(number, best.ours.number)]
        if number in partner and best.theirs is start:
            factor = _factor(origin, start, kept)
            left = left if factor is None else origin
    known, apart = kept[0].get(left.number), best.apart
    in_order = known is not None and (
        difference(known, kept[1][best.theirs.number])
        <= SAME_SHAPE * left.digest.size
    )
    for value in repeats[start.number]:
        origin = ours.values[partner[value.number]]
        known, laid = kept[0][origin.number], kept[1][value.number]
        if _mixed(known, laid, theirs.times(value)):
            left, right, start, factor = origin, value, value, 1.0
            in_order = False
            break
    cut = next(theirs.parts_before(start), None) if best.rank else None
    if cut is not None:
        parts = [
            v
            for v in ours.values
            if partner.get(cut.inputs[0]) in v.inputs
            and v.number not in ours.known
            and ours.cuts(v)
        ]
        left, right, start = (parts or [left])[0], cut, cut
        factor, apart, in_order = None, math.inf, False
    # a step of the left alone that leads to its value
    steps = [c[0] for c in chains[0] if best.ours in c[1:]]
    line = _line(best.ours)[:2]
    alone = (v.place for v in steps if _line(v)[:2] != line)
    by_line = {(p.path, p.line): p for p in (*reversed(shown), right.place)}
    shown = sorted(by_line.values(), key=[right.place, *shown].index)
    widths = {v.shape[-1] for v in theirs.values if v.shape}
    return Divergence(
        left.place,
        right.place,
        right.shape,
        apart if math.isfinite(apart) else None,
        order=(left.number, right.number),
        inputs=theirs.inputs_apart(start),
        factor=factor,
        cause=_likely_cause(factor, widths)
        or _own_input(
            kept[0].get(best.ours.number),
            kept[1].get(best.theirs.number),
            [kept[1][n] for n in best.theirs.inputs if n in kept[1]],
        ),
        shown=tuple(shown[:STARTS]),
        scores=matches.apart if all(s.scored for s in sides) else None,
        before=next(alone, None),
        in_order=in_order,
    )


def _computed_first(fits: Sequence["Fit"], left: Sequence[Value]) -> "Fit":
    """Return the first array, but for a later one that is computed before.

    It is where all values of its size on the left, in the layer of the first
    of them, come before those of the other's size: llm.c has atty in front
    of preatt and att.
    """

    def numbers(fit: "Fit") -> list[int]:
        size = math.prod(fit.theirs.shape)
        alike = [v for v in left if math.prod(v.shape) == size]
        layers = {v.place.layer for v in alike[:1]}
        return [v.number for v in alike if v.place.layer in layers]

    best = fits[0]
    for fit in fits[1:] if best.rank < 2 else ():
        ours, others = numbers(fit), numbers(best)
        if ours and others and max(ours) < min(others):
            best = fit
    return best


def _mixed(left: Tensor, right: Tensor, times: int) -> bool:
    """Whether heads that are there several times stand in another order."""
    near = SAME_SHAPE * float(right.abs().max())

    def heads(value: Tensor, first: int, last: int) -> Tensor:
        whole = value.flatten(first, last).movedim(first, 0)
        rows = whole.reshape(len(whole), -1).sort(-1).values
        return rows[:, :: 1 + rows.size(1) // MOST_MARKS]

    def repeated(rows: Tensor) -> bool:
        apart = (rows[:, None] - rows).abs().amax(-1)
        return bool(((apart <= near).sum(0) == times).all())

    def heads_of(value: Tensor) -> list[Tensor]:
        # a group's heads may be on an axis of their own
        axes = range(value.dim())
        found = [heads(value, a, b) for a in axes for b in axes[a:]]
        return [
            rows
            for rows in found
            if times < len(rows) <= MOST_HEADS
            if repeated(rows)
        ]

    ours, theirs = heads_of(left), heads_of(right)
    return bool(ours and theirs) and not any(
        one.shape == other.shape and bool((one - other).abs().max() <= near)
        for one in ours
        for other in theirs
    )


class Fit(NamedTuple):
    """Two values that may stand for the same thing."""

    ours: Value
    theirs: Value
    apart: float
    rank: int = 1  # 0: a counterpart; 1: a step before it; 2: none


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
            near = _nearest_of(theirs, open_values[0], kept)
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
            return best._replace(rank=0)
        # both sides have taken steps before: it is one of these
        step = earlier[0]
        if step.apart > FAR * step.ours.digest.size:
            return Fit(open_values[0][0], step.theirs, math.inf)
        return step
    return Fit(open_values[0][0], open_values[1][0], math.inf, 2)


def _nearest_of(
    theirs: Value,
    left: Sequence[Value],
    kept: Sequence[Mapping[int, Tensor]],
) -> list[Fit]:
    """Return the values of the left of one size, the nearest first."""
    size = theirs.digest.finite + theirs.digest.other
    alike = [v for v in left if v.digest.finite + v.digest.other == size]
    alike.sort(key=lambda v: v.digest.distance(theirs.digest))
    near = [
        Fit(
            ours,
            theirs,
            difference(kept[0][ours.number], kept[1][theirs.number])
            if i < MEASURED
            else math.inf,
        )
        for i, ours in enumerate(alike)
    ]
    return sorted(near, key=attrgetter("apart"))


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
    return scale if gap <= SAME_SHAPE * right.digest.size else None


def _line(value: Value) -> tuple[object, ...]:
    place = value.place
    return place.path, place.line, place.span, place.inside


def _likely_cause(factor: float | None, widths: Collection[int]) -> str:
    """Return what it suggests that the right is so many times the left.

    2.828 is the root of 8, the width of a head: the scores lack their
    1 / sqrt(8). 5.657 is the root of 32, the model's width: the embedding's
    scale. Widths are sizes of axes of the values around.
    """
    if factor is None or factor <= 0:
        return ""
    size = max(factor, 1 / factor)
    over, under = ("", "1 / ") if factor > 1 else ("1 / ", "")
    for power, root, name in ((2, "the root of ", "sqrt({})"), (1, "", "{}")):
        width = round(size**power)
        near = abs(size / width ** (1 / power) - 1) < CLOSE
        if near and width > 1 and width in widths:
            return (
                f"{over}{size:.4g} is {over}{root}{width}: is a factor "
                f"{under}{name.format(width)} missing?"
            )
    return ""


def _own_input(
    left: Tensor | None, right: Tensor | None, inputs: Sequence[Tensor]
) -> str:
    """Return what it suggests that two values differ by an input, or ""."""
    if left is None or right is None or left.numel() != right.numel():
        return ""
    gap = nearest_layout(right, left, 0.0)[0] - left
    for value in inputs:
        near = CLOSE * float(value.abs().max())
        if any(difference(value, c * gap, near) <= near for c in (1, -1)):
            return "they differ by its input: 1 + weight on one side?"
    return ""
