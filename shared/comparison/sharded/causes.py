"""Sentences for the step at which a sharded model parts from its original."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from ...invariants.ranks import Ranks
from ..values.side import Side
from ..values.value import Value
from .placing import Finder, Placed, as_runs

REDUCES = ("all_reduce", "allreduce", "reduce_scatter")
GATHERS = ("gather", "all_to_all", "alltoall", "broadcast")
POINTWISE = ("+", "-", "*", "/", "+=", "-=", "*=", "/=", "where")


@dataclass
class Step:
    """One value of the sharded model, on all ranks.

    Attributes:
        place, op, module: where it is computed, what, and in which.
        inputs: the events that it is computed from.
        distinct: whether the model's own code computes it, and it has enough
            different numbers to be recognised.
        constant: whether it depends on no token.
        placed: where this rank's stands on the left.
        kinds: how it stands there, "" for nowhere, by the ranks that have it.
        sum: of all ranks, where one is lost; sum_placed: where it stands.
    """

    place: str
    op: str
    module: str
    inputs: set[int]
    distinct: bool
    constant: bool
    placed: Placed | None = None
    kinds: dict[int, str] = field(default_factory=dict)
    sum: Tensor | None = None
    sum_placed: Placed | None = None

    @property
    def judged(self) -> bool:
        """Whether the left must have it."""
        return self.distinct and not self.constant

    @property
    def lost_on(self) -> list[int]:
        """The ranks whose value the left has nowhere."""
        return [rank for rank, kind in self.kinds.items() if not kind]

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
    parameters: Mapping[str, Tensor],
    sources: Mapping[str, str],
    ranks: Ranks,
) -> str:
    """Return what this rank sees at the step that parts, or "".

    Args:
        event: of that step.
        steps: all that lead to the scores.
        kept: values of this rank by their events.
        finder: the values of the left.
        left: the model on one process.
        parameters: of this rank.
        sources: the left's parameter of each.
        ranks: all.
    """
    step, module = steps[event], left.module()
    if event not in kept:  # another rank's
        return ""
    names = dict(module.named_parameters()) if module is not None else {}
    weighted = {*map(_owner, names)}

    def followed(placed: Placed) -> list[Value]:
        """Return what the left makes of a value by the same operation."""
        return [
            value
            for value in left.values
            if placed.value in value.inputs and value.place.op == step.op
        ]

    inputs = [(e, steps[e]) for e in sorted(step.inputs) if e in steps]
    summed = any(one.reduces for one in steps.values() if event in one.inputs)
    bias = _bias(step, finder, parameters, ranks.count) if summed else ""
    if bias:
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
    owners = {_owner(name): _owner(s) for name, s in sources.items()}
    own = owners.get(step.module, "")
    for one, placed in known:
        theirs = {value.place.module for value in followed(placed)} & weighted
        if own and theirs and own not in theirs:
            return (
                f"{own} is given {one.place}, which the left gives to "
                f"{min(theirs)}: do layers, or stages, run in another order?"
            )
    for (one, first), (_, second) in combinations(known, 2):
        if first.value == second.value and first.picked != second.picked:
            return (
                f"{one.place} and its other input are both parts of "
                f"{_line(left, first)}, {first} and {second}: is a fused "
                f"weight of queries, keys and values cut as if it were one?"
            )
    expected = ""
    for _, placed in known:
        for value in followed(placed):
            whole = finder.values.get(value.number)
            if whole is None or value.shape != placed.shape:
                continue
            want = placed.part_of(whole)
            if want.numel() != kept[event].numel():
                continue
            expected = f"; the left continues at {value.place}"
            if words := _mask(kept[event], want, placed):
                return words + expected
    for one, placed in known:
        if not placed.ascending:
            return (
                f"its input {one.place} is that of {_line(left, placed)} in "
                f"another order ({placed}): were the pieces gathered, and "
                f"put back in their order?{expected}"
            )
    made = ", ".join(
        f"{one.place} is {_line(left, placed)} ({placed})"
        for one, placed in known
    )
    made = f"; of its inputs, {made}" if made else ""
    return f"no value on the left equals it, or its sum{made}{expected}"


def _owner(name: str) -> str:
    """Return the name of the module that has a parameter."""
    return name.rpartition(".")[0]


def _line(left: Side, placed: Placed | None) -> str:
    if placed is None:
        return ""
    bias, number = divmod(placed.value, len(left.values))
    return str(left.values[number].place) + " without its bias" * bias


def _bias(
    step: Step, finder: Finder, parameters: Mapping[str, Tensor], count: int
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
        for name, bias in parameters.items():
            if bias.shape != often.shape:
                continue
            if float((bias.detach() - often).abs().max()) <= near:
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
