"""Sentences for the step at which a sharded model parts from its original."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations

import torch
from torch import Tensor

from ..running.ranks import local
from ..tracing.value import plain
from .parameters import Run
from .placing import OTHER, Placed, Whole, as_runs, find

REDUCES = ("all_reduce", "allreduce", "reduce_scatter")
GATHERS = ("gather", "all_to_all", "alltoall", "broadcast")
POINTWISE = ("+", "-", "*", "/", "+=", "-=", "*=", "/=", "where")
PART_OF_SUM = "a part of a sum"
PUT_BACK = "were the pieces gathered, and put back in their order?"


@dataclass
class Step:
    """One value of the sharded model, on all ranks."""

    place: str  # where it is computed
    op: str  # by which operation
    module: str  # and in which module
    inputs: dict[str, None]  # the names of those that it is computed from
    # whether the model's own code computes it, and it has enough different
    # numbers to be recognised
    distinct: bool
    judged: bool  # whether the left must have it: it depends on tokens as well
    value: Tensor | None = None  # this rank's, if it has one
    placed: Placed | None = None  # where that stands on the left
    # how it stands there, "" for nowhere, by the ranks that have it
    kinds: dict[int, str] = field(default_factory=dict)
    sum: Tensor | None = None  # of all ranks, where one is lost
    sum_placed: Placed | None = None  # where the sum stands

    @property
    def kind(self) -> str:
        """How the ranks together have it, "" where one has it not."""
        if self.sum_placed is not None:
            return PART_OF_SUM
        return min(self.kinds.values(), default="whole")

    @property
    def collective(self) -> str:
        """Whether a collective "reduces" or "gathers" here, "" if none."""
        if any(name in self.op for name in REDUCES):
            return "reduces"
        return "gathers" if any(name in self.op for name in GATHERS) else ""


def causes(
    name: str, steps: Mapping[str, Step], wholes: Mapping[int, Whole], run: Run
) -> Iterator[str]:
    """Yield what this rank sees at the step that parts, the likeliest first.

    Nothing where this rank has it not. Steps are all that lead to the scores;
    wholes the values of the left by their numbers.
    """
    step, count = steps[name], run.ranks.count
    if step.value is None:
        return
    inputs = [steps[n] for n in step.inputs]
    known = [(one, one.placed) for one in inputs if one.placed is not None]
    uses = {one.collective for one in steps.values() if name in one.inputs}
    if step.sum is not None and "reduces" in uses:
        added = {one.place: one.value for one in inputs}
        for weight, p in run.part.named_parameters():
            added[f"the bias {weight}"] = plain(local(p))
        shapes = step.sum.shape, step.sum.shape[-1:]
        for what, value in added.items():
            if value is None or value.shape not in shapes:
                continue
            total = step.sum - (count - 1) * value
            if find(total, step.op, wholes.values()):
                yield (
                    f"every rank adds {what}, so the sum over the ranks has "
                    f"it {count} times"
                )
    for one in [*inputs, step]:
        if one.sum_placed is not None and step.collective != "reduces":
            yield (
                f"an all_reduce is missing: {one.place} is a part of a sum "
                f"on each rank, and is used unsummed; the sum over the ranks "
                f"is {one.sum_placed.of.name} on the left"
            )
    if step.placed is not None:
        yield (
            f"the numbers are those of {step.placed.of.name}, in another "
            f"order or a part of them: {step.placed}; {PUT_BACK}"
        )
    for (one, first), (other, second) in permutations(known, 2):
        if step.op not in POINTWISE:
            if first.of is second.of and first != second:
                yield (
                    f"{one.place} and its other input are both parts of "
                    f"{first.of.name}, {first} and {second}: is a fused "
                    f"weight of queries, keys and values cut as if it were "
                    f"one?"
                )
        elif one.judged:
            own = f"rank {run.ranks.rank} counts positions from 0"
            axes = zip(
                *(first.of.shape[::-1], first.picked[::-1]),
                *(second.of.shape[::-1], second.picked[::-1]),
                strict=False,
            )
            for size, ours, same, theirs in axes:
                alike = (size, len(ours)) == (same, len(theirs))
                if alike and ours != theirs:
                    yield (
                        f"{one.place} is at {as_runs(ours)} on the left, "
                        f"{other.place} at {as_runs(theirs)}: "
                        f"{PUT_BACK if other.judged else own}"
                    )
    after = [
        (one, placed, value)
        for one, placed in known
        for value in run.left.values
        if placed.of.number in value.inputs and value.place.op == step.op
    ]
    to = {of.place.module for _, _, of in after} & {*map(owner, run.weights)}
    owners = {owner(n): owner(source) for n, (source, _) in run.pieces.items()}
    own = owners.get(step.module, "")
    if own and to and own not in to:
        yield (
            f"{own} is given {after[0][0].place}, which the left gives to "
            f"{min(to)}: do layers, or stages, run in another order?"
        )
    expected = ""
    for _, placed, of in after:
        if of.number in wholes and of.shape == placed.of.shape:
            want = placed.part_of(wholes[of.number].tensor)
            if want.numel() == step.value.numel():
                expected = f"; the left continues at {of.place}"
                if words := _mask(step.value, want, placed):
                    yield words + expected
    for one, placed in known:
        if placed.kind == OTHER:
            yield (
                f"its input {one.place} is that of {placed.of.name} in "
                f"another order ({placed}): {PUT_BACK}{expected}"
            )
    made = ", ".join(f"{one.place} is {p.of.name} ({p})" for one, p in known)
    made = f"; of its inputs, {made}" if made else ""
    yield f"no value on the left equals it, or its sum{made}{expected}"


def owner(name: str) -> str:
    """Return the name of the module that has a parameter."""
    return name.rpartition(".")[0]


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
