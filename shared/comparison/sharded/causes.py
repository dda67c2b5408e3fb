"""Sentences for the step at which a sharded model parts from its original."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...invariants.ranks import Ranks
from ..values.side import Side
from .placing import Finder, Placed, as_runs

REDUCES = ("all_reduce", "allreduce", "reduce_scatter")
GATHERS = ("gather", "all_to_all", "alltoall", "broadcast")
POINTWISE = ("+", "-", "*", "/", "+=", "-=", "*=", "/=", "where")


@dataclass
class Step:
    """One value of the sharded model, on all ranks.

    Attributes:
        place, op: where a rank computes it, and what.
        inputs: the events that it is computed from.
        placed: where this rank's stands on the left.
        lost_on: the ranks whose value the left has nowhere.
        sum: of all ranks, where one is lost; sum_placed: where it stands.
    """

    place: str
    op: str
    inputs: set[int] = field(default_factory=set)
    trivial: bool = False
    constant: bool = True
    inside: bool = True  # the model's own code
    placed: Placed | None = None
    lost_on: list[int] = field(default_factory=list)
    sum: Tensor | None = None
    sum_placed: Placed | None = None

    @property
    def judged(self) -> bool:
        """Whether it depends on tokens, and can be told from other values."""
        return self.inside and not self.trivial and not self.constant

    @property
    def partial(self) -> bool:
        """Whether it is a part of a sum over the ranks."""
        return bool(self.lost_on) and self.sum_placed is not None

    @property
    def matched(self) -> bool:
        """Whether the left has it, in whatever way."""
        return not self.lost_on or self.sum_placed is not None

    @property
    def reduces(self) -> bool:
        """Whether a collective sums it up."""
        return any(name in self.op for name in REDUCES)

    @property
    def gathers(self) -> bool:
        """Whether a collective brings it from other ranks, unsummed."""
        return not self.reduces and any(name in self.op for name in GATHERS)


def cause(
    event: int,
    steps: dict[int, Step],
    kept: dict[int, Tensor],
    finder: Finder,
    left: Side,
    vectors: Mapping[str, Tensor],
    ranks: Ranks,
) -> str:
    """Return what this rank sees at the step that parts, or "".

    Args:
        event: of that step.
        steps: all that lead to the scores.
        kept: values of this rank by their events.
        finder: the values of the left.
        left: the model on one process.
        vectors: parameters of this rank with one axis.
        ranks: all.
    """
    step = steps[event]
    inputs = [(e, steps[e]) for e in sorted(step.inputs) if e in steps]
    summed = any(
        other.reduces for other in steps.values() if event in other.inputs
    )
    if (bias := _bias(step, finder, vectors, ranks.count)) and summed:
        return (
            f"every rank adds {bias}, so the sum over the ranks has it "
            f"{ranks.count} times"
        )
    partial = [one for _, one in inputs if one.partial]
    if partial and not step.reduces:
        return (
            f"an all_reduce is missing: {partial[0].place} is a part of a "
            f"sum on each rank, and is used unsummed; the sum over the ranks "
            f"is {_line(left, partial[0].sum_placed)} on the left"
        )
    if bias:
        return (
            f"an all_reduce is missing before {bias} is added: the ranks' "
            f"values are parts of a sum"
        )
    if step.partial:
        return (
            f"an all_reduce is missing: each rank returns a part of the sum "
            f"that is {_line(left, step.sum_placed)} on the left"
        )
    if step.placed is not None:
        return (
            f"the numbers are the left's, in another order or a part of "
            f"them: {step.placed}; were the ranks' pieces gathered and put "
            f"back in their order?"
        )
    known = [(one, one.placed) for _, one in inputs if one.placed is not None]
    if step.op in POINTWISE:
        for one, first in known:
            for other, second in known:
                if words := _positions(one, first, other, second, ranks):
                    return words
    expected = ""
    for _, placed in known:
        for number, want in _expected(step, placed, finder, left):
            if want.numel() != kept[event].numel():
                continue
            expected = f"; the left continues at {left.values[number].place}"
            if words := _mask(kept[event], want, placed):
                return words + expected
    for one, placed in known:
        if placed.kind == "another order":
            return (
                f"its input {one.place} is that of "
                f"{_line(left, placed)} in another order ({placed}): were "
                f"the pieces gathered in the order of the ranks?{expected}"
            )
    made = ", ".join(
        f"{one.place} is {_line(left, placed)} ({placed})"
        for one, placed in known
    )
    made = f"; of its inputs, {made}" if made else ""
    return f"no value on the left equals it, or its sum{made}{expected}"


def _line(left: Side, placed: Placed | None) -> str:
    if placed is None:
        return ""
    bias, number = divmod(placed.value, len(left.values))
    return str(left.values[number].place) + " without its bias" * bias


def _bias(
    step: Step, finder: Finder, vectors: Mapping[str, Tensor], count: int
) -> str:
    """Return the vector that the ranks' sum has too often, or ""."""
    total = step.sum
    if total is None or step.sum_placed is not None:
        return ""
    for number, value in finder.values.items():
        if value.shape != total.shape:
            continue
        near = count * finder.near[number]
        gap = (total - value).reshape(-1, total.size(-1))
        often = gap[0] / (count - 1)
        if not bool((gap - gap[0]).abs().max() <= near):
            continue
        for name, vector in vectors.items():
            if vector.numel() != len(often):
                continue
            if float((vector - often).abs().max()) <= near:
                return f"the bias {name}"
    return ""


def _positions(
    one: Step, first: Placed, other: Step, second: Placed, ranks: Ranks
) -> str:
    """Say that a rank joins values of two parts, or in two orders, or ""."""
    pairs = zip(
        first.shape[::-1],
        second.shape[::-1],
        first.picked[::-1],
        second.picked[::-1],
        strict=False,
    )
    for size, same, ours, theirs in pairs:
        if size != same or ours == theirs or len(ours) != len(theirs):
            continue
        if {*ours} == {*theirs}:
            return (
                f"{one.place} holds {as_runs(ours)} of the left's axis of "
                f"{size}, {other.place} {as_runs(theirs)}: were the pieces "
                f"put back in their order?"
            )
        if theirs == (*range(len(theirs)),):
            return (
                f"{one.place} is at {as_runs(ours)} on the left, "
                f"{other.place} at {as_runs(theirs)}: rank {ranks.rank} "
                f"counts positions from 0"
            )
    return ""


def _expected(
    step: Step, placed: Placed, finder: Finder, left: Side
) -> list[tuple[int, Tensor]]:
    """Return what the left makes of a value by the same operation."""
    found = []
    for value in left.values:
        if placed.value not in value.inputs or value.place.op != step.op:
            continue
        if value.number in finder.values and value.shape == placed.shape:
            part = finder.values[value.number]
            for axis, indices in enumerate(placed.picked):
                part = part.index_select(axis, torch.tensor(indices))
            found.append((value.number, part))
    return found


def _mask(value: Tensor, want: Tensor, placed: Placed) -> str:
    """Say where a rank hides other numbers than the left, or ""."""
    ours, theirs = value.reshape(want.shape).isinf(), want.isinf()
    if not (ours.any() and theirs.any()) or ours.equal(theirs):
        return ""
    row = int((ours != theirs).flatten(0, -2).any(-1).nonzero()[0])
    at = row % want.size(-2)
    query, keys = placed.picked[-2][at], torch.tensor(placed.picked[-1])
    seen = [keys[~m.flatten(0, -2)[row]].sort()[0] for m in (ours, theirs)]
    own, left = (as_runs(s.tolist()) for s in seen)
    words = f"position {query} sees keys {own}, on the left {left}"
    if not bool((keys.diff() == 1).all()):
        order = as_runs(keys.tolist())
        return f"{words}; the keys are in the order {order}: is the mask?"
    if at < query and own == as_runs(range(at + 1)):
        return f"{words}: the mask counts a rank's positions from 0"
    return words
