"""Find the first line of a model whose value the other model lacks."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from ...running.places import Place
from ...running.tolerances import MARKS_SHARE, ROOT_SHARE
from ...tracing.value import HEAD, Value
from .flow import LIKENESS_SHARE, STARTS, Flow
from .layouts import difference, nearest_layout
from .matching import Matches
from .rows import Divergence
from .side import Side

FAR = 2.0  # values that differ by this many times their size are unrelated
MOST_HEADS, MOST_MARKS = 128, 256  # most heads, and most entries of a head
VALUES_FOR_A_RECORDING = 96  # most left values to compare with an array
VALUES_FOR_STATISTICS = 8  # most left values to compare with statistics
MEASURED = 4  # most left values to compare in full with a right value


@dataclass(frozen=True)
class Frontier:
    """The first values of each model that the other model lacks.

    Attributes:
        sides: each model's run.
        flows: for each model, which of its values the other explains.
        matches: the pairs of equal values.
        chains: for each side, one list for each start. A start is an
            unexplained value whose inputs are explained. Its list has the
            start, then the values that the same module call makes from it.
        partner: maps the number of a right value to that of its left
            counterpart, which was found, or named by the user.
        repeats: for each start on the right, the values before it that
            repeat their input, such as key/value heads.
        kept: for each side, the compared tensors, by value number.
        fits: for each start on the right, the nearest value of the left. The
            best pair comes first.
        best: the pair that the divergence reports.
    """

    sides: tuple[Side, Side]
    flows: tuple[Flow, Flow]
    matches: Matches
    chains: tuple[list[list[Value]], list[list[Value]]]
    partner: Mapping[int, int]
    repeats: Mapping[int, list[Value]]
    kept: Sequence[Mapping[int, Tensor]]
    fits: "Sequence[Fit]"
    best: "Fit"

    @property
    def chain(self) -> list[Value]:
        """Return the right's chain that has the best pair's right value."""
        return next(c for c in self.chains[1] if self.best.theirs in c)

    @property
    def start(self) -> Value:
        """Return the right's first value without a counterpart."""
        return self.chain[0]

    @property
    def pair(self) -> tuple[Value, Value]:
        """Return the best pair, with whole values instead of heads."""
        left, right = (
            flow.values[v.inputs[0]] if HEAD.search(v.place.inside) else v
            for flow, v in zip(
                self.flows, (self.best.ours, self.best.theirs), strict=True
            )
        )
        return left, right

    def in_order(self, left: Value) -> bool:
        """Return whether a left value equals the right value of the best pair.

        Both must have their entries in the same order.
        """
        known = self.kept[0].get(left.number)
        return known is not None and (
            difference(known, self.kept[1][self.best.theirs.number])
            <= MARKS_SHARE * left.digest.size
        )


@dataclass(frozen=True)
class Explanation:
    """How two models differ, as the result shows it.

    Attributes:
        left, right: the two values to show.
        start: the first unexplained value on the right, whose inputs are
            compared.
        apart: the largest difference of the two values.
        factor: c, if the right is c times the left.
        in_order: whether both values have their entries in the same order.
    """

    left: Value
    right: Value
    start: Value
    apart: float
    factor: float | None = None
    in_order: bool = False


def find_divergence(
    sides: tuple[Side, Side], flows: tuple[Flow, Flow], matches: Matches
) -> Divergence:
    """Find the first lines at which two models differ."""
    at = find_frontier(sides, flows, matches)
    told = next(filter(None, (explain(at) for explain in EXPLANATIONS)))
    theirs = flows[1]
    widths = {v.shape[-1] for v in theirs.values if v.shape}
    return Divergence(
        told.left.place,
        told.right.place,
        told.right.shape,
        told.apart if math.isfinite(told.apart) else None,
        order=(told.left.number, told.right.number),
        inputs=theirs.inputs_apart(told.start),
        factor=told.factor,
        cause=_likely_cause(told.factor, widths) or _own_input(at),
        shown=_lines_shown(at, told.right),
        scores=matches.apart if all(s.scored for s in sides) else None,
        before=_step_of_the_left(at),
        in_order=told.in_order,
    )


# --- Explanations: the first that applies is reported ------------------------


def missing_cut(at: Frontier) -> Explanation | None:
    """Explain a difference by slices: the models cut out different parts."""
    ours, theirs = at.flows
    cut = next(theirs.parts_before(at.start), None) if at.best.rank else None
    if cut is None:
        return None
    parts = [
        value
        for value in ours.values
        if at.partner.get(cut.inputs[0]) in value.inputs
        and value.number not in ours.known
        and ours.cuts(value)
    ]
    left = parts[0] if parts else at.pair[0]
    return Explanation(left, cut, cut, math.inf)


def mixed_heads(at: Frontier) -> Explanation | None:
    """Explain a difference by key/value heads repeated in another order."""
    for value in at.repeats[at.start.number]:
        origin = at.flows[0].values[at.partner[value.number]]
        known, laid = at.kept[0][origin.number], at.kept[1][value.number]
        if _mixed(known, laid, at.flows[1].times(value)):
            return Explanation(origin, value, value, at.best.apart, 1.0)
    return None


def scaled_input(at: Frontier) -> Explanation | None:
    """Explain a difference by an input that only the right model scales."""
    best, start = at.best, at.start
    if best.theirs is not start or _factor(best.ours, start, at.kept):
        return None
    for number in start.inputs:
        if number in at.partner:
            origin = at.flows[0].values[at.partner[number]]
            factor = _factor(origin, start, at.kept)
            if factor is not None:
                in_order = at.in_order(origin)
                _, right = at.pair
                return Explanation(
                    origin, right, start, best.apart, factor, in_order
                )
    return None


def nearest_value(at: Frontier) -> Explanation:
    """Report the nearest left value, and the factor if there is one."""
    left, right = at.pair
    factor = _factor(at.best.ours, at.best.theirs, at.kept)
    in_order = at.in_order(left)
    return Explanation(left, right, at.start, at.best.apart, factor, in_order)


EXPLANATIONS: tuple[Callable[[Frontier], Explanation | None], ...] = (
    missing_cut,
    mixed_heads,
    scaled_input,
    nearest_value,
)


def _lines_shown(at: Frontier, right: Value) -> tuple[Place, ...]:
    """Return the right model's lines to inspect, the likeliest first."""
    ours, theirs = at.flows
    # after these lines the left computes more, so the right may omit a step
    omitted = [
        theirs.values[ours.partner[number]].place
        for chain in at.chains[0]
        for number in reversed(chain[0].inputs)
        if number in ours.partner
    ]
    first = at.pair[1]
    moves = [*theirs.moves_to(first), *theirs.moves_to(at.start)]
    shown = [first.place, *omitted[:1], *moves[:1]]
    shown += [v.place for v in (*(f.theirs for f in at.fits), *at.chain)]
    shown += [*moves, *omitted]
    by_line = {(p.path, p.line): p for p in (*reversed(shown), right.place)}
    ordered = sorted(by_line.values(), key=[right.place, *shown].index)
    return tuple(ordered[:STARTS])


def _step_of_the_left(at: Frontier) -> Place | None:
    """Return a step that only the left model takes before its best match."""
    best = at.best.ours
    steps = [c[0] for c in at.chains[0] if best in c[1:]]
    line = _line(best)[:2]
    return next((v.place for v in steps if _line(v)[:2] != line), None)


# --- The frontier ------------------------------------------------------------


def find_frontier(
    sides: tuple[Side, Side], flows: tuple[Flow, Flow], matches: Matches
) -> Frontier:
    """Find each model's first values without a counterpart."""
    ours, theirs = flows
    chains = _chains(sides, flows)
    named = {r: n for n, r in matches.named_apart}
    partner = theirs.partner | named
    starts = [chain[0] for chain in chains[1]]
    repeats = {
        start.number: _repeats(theirs, start, partner) for start in starts
    }
    kept = _keep_compared(sides, chains, partner, named, repeats)
    lines: set[tuple[object, object]] = {
        (_line(ours.values[n]), _line(theirs.values[r]))
        for n, r in matches.pairs
    }
    own = [value for chain in chains[0] for value in chain]
    fits: list[Fit] = []
    for start, chain in zip(starts, chains[1], strict=True):
        near = _nearest_of(start, own, kept) if theirs.recorded else []
        found = near[:1] or [
            _comparable((its, chain), kept, lines) for its in chains[0]
        ]
        if start.number in named:
            origin = ours.values[named[start.number]]
            gap = matches.named_apart[origin.number, start.number]
            found = [Fit(origin, start, gap, 0)]
        fits.append(min(found, key=attrgetter("rank")))
    # fits of equal rank keep their order, because the sort is stable; for a
    # file, ranks 0 and 1 count as equal
    fits.sort(key=lambda fit: fit.rank == 2 if theirs.recorded else fit.rank)
    best = _computed_first(fits, own) if theirs.recorded else fits[0]
    return Frontier(
        sides, flows, matches, chains, partner, repeats, kept, fits, best
    )


def _chains(
    sides: tuple[Side, Side], flows: tuple[Flow, Flow]
) -> tuple[list[list[Value]], list[list[Value]]]:
    """Return `Frontier.chains`: the starts, and the values after each."""
    ours, theirs = flows
    left = [ours.same_call(v) for v in ours.starts()]
    # skip the right's extra arrays before the left's first difference
    before = min(ours.made_of(chain[0]) for chain in left)
    right = [theirs.same_call(v) for v in theirs.starts(before)]
    if theirs.recorded:  # the counterpart of an array may be a later value
        whole = sides[1].reduce is None
        most = VALUES_FOR_A_RECORDING if whole else VALUES_FOR_STATISTICS
        left = [ours.open[:most] or left[0]]
    return left, right


def _repeats(
    theirs: Flow, start: Value, partner: Mapping[int, int]
) -> list[Value]:
    """Return the values before `start` that only repeat their input."""
    return [
        value
        for value in theirs.moved_before(start)
        if value.number in partner and len(value.inputs) == 1
        if theirs.times(value) > 1
    ]


def _keep_compared(
    sides: tuple[Side, Side],
    chains: tuple[list[list[Value]], list[list[Value]]],
    partner: Mapping[int, int],
    named: Mapping[int, int],
    repeats: Mapping[int, list[Value]],
) -> list[dict[int, Tensor]]:
    """Return the tensors of each side to compare, by value number."""
    before = {r for chain in chains[1] for r in chain[0].inputs}
    before |= {v.number for found in repeats.values() for v in found}
    sources = {partner[r] for r in before if r in partner}
    return [
        side.keep(more.union(*([v.number for v in c] for c in chain)))
        for side, chain, more in zip(
            sides, chains, (sources | {*named.values()}, before), strict=True
        )
    ]


def _computed_first(fits: Sequence["Fit"], left: Sequence[Value]) -> "Fit":
    """Return the fit whose array is computed first, even if stored later.

    llm.c stores atty before preatt and att, but computes it after them. The
    order is that in which the left computes values of the arrays' sizes.
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
    """Return whether the right model repeats heads in a different order."""
    near = MARKS_SHARE * float(right.abs().max())

    def heads(value: Tensor, first: int, last: int) -> Tensor:
        whole = value.flatten(first, last).movedim(first, 0)
        rows = whole.reshape(len(whole), -1).sort(-1).values
        return rows[:, :: 1 + rows.size(1) // MOST_MARKS]

    def repeated(rows: Tensor) -> bool:
        apart = (rows[:, None] - rows).abs().amax(-1)
        return bool(((apart <= near).sum(0) == times).all())

    def heads_of(value: Tensor) -> list[Tensor]:
        # merge two axes, because the heads of a group may have their own axis
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
    """A value of the left model and one of the right that may correspond."""

    ours: Value
    theirs: Value
    apart: float
    rank: int = 1  # 0: the same value; 1: an earlier value; 2: unrelated


def _comparable(
    open_values: tuple[Sequence[Value], Sequence[Value]],
    kept: Sequence[Mapping[int, Tensor]],
    known: set[tuple[object, object]],
) -> Fit:
    """Return the first pair of values that compute the same thing.

    One side may take several steps where the other takes one. So all given
    values of the two sides are compared. `known` holds the pairs of lines that
    match in another layer.
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
                if (i == 0 and f.apart <= LIKENESS_SHARE * f.ours.digest.size)
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
        # both sides compute an earlier value, which already differs
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
    """Return left values with the right value's size, the nearest first."""
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
    """Return c if the right is c times the left, or None.

    The entries of the two values may be in another order.
    """
    scale = left.digest.scale_of(right.digest)
    if scale is None:
        return None
    ours = (kept[0][left.number] * scale).flatten().sort().values
    theirs = kept[1][right.number].flatten().sort().values
    gap = (ours - theirs).abs().nan_to_num(0.0).max()
    return scale if gap <= MARKS_SHARE * right.digest.size else None


def _line(value: Value) -> tuple[object, ...]:
    place = value.place
    return place.path, place.line, place.span, place.inside


def _likely_cause(factor: float | None, widths: Collection[int]) -> str:
    """Return the cause that a factor between two values suggests, or "".

    For example, 2.828 is the root of 8. If heads have a width of 8, the
    attention scores lack their 1 / sqrt(8). `widths` holds the sizes of the
    last axes of the model's values.
    """
    if factor is None or factor <= 0:
        return ""
    size = max(factor, 1 / factor)
    over, under = ("", "1 / ") if factor > 1 else ("1 / ", "")
    for power, root, name in ((2, "the root of ", "sqrt({})"), (1, "", "{}")):
        width = round(size**power)
        near = abs(size / width ** (1 / power) - 1) < ROOT_SHARE
        if near and width > 1 and width in widths:
            return (
                f"{over}{size:.4g} is {over}{root}{width}: is a factor "
                f"{under}{name.format(width)} missing?"
            )
    return ""


def _own_input(at: Frontier) -> str:
    """Return a cause if the difference of the values is an input, or ""."""
    ours, theirs = at.kept
    left, right = (
        ours.get(at.best.ours.number),
        theirs.get(at.best.theirs.number),
    )
    if left is None or right is None or left.numel() != right.numel():
        return ""
    gap = nearest_layout(right, left, 0.0)[0] - left
    for number in at.best.theirs.inputs:
        if number not in theirs:
            continue
        value = theirs[number]
        near = ROOT_SHARE * float(value.abs().max())
        if any(difference(value, c * gap, near) <= near for c in (1, -1)):
            return "they differ by its input: 1 + weight on one side?"
    return ""
