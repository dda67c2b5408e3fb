"""Explain the first step where a sharded model differs from its original.

The "left" is the original model, on one process.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations

import torch
from torch import Tensor

from ..running.ranks import local
from ..tracing.value import Value, plain
from .parameters import Run
from .placing import OTHER, Placed, Whole, as_runs, find

REDUCES = ("all_reduce", "allreduce", "reduce_scatter")
GATHERS = ("gather", "all_to_all", "alltoall", "broadcast")
POINTWISE = ("+", "-", "*", "/", "+=", "-=", "*=", "/=", "where")
PART_OF_SUM = "a part of a sum"
PUT_BACK = "were the pieces gathered, and put back in their order?"


@dataclass
class Step:
    """A step of the sharded model: a line, and the value that it computes."""

    place: str  # the line that computes the value
    op: str  # the operation that computes the value
    module: str  # the module that computes the value
    inputs: dict[str, None]  # names of the steps whose values are inputs
    # whether the model's own code computes the value, and the value has enough
    # different entries to be recognised
    distinct: bool
    judged: bool  # whether it is distinct, and depends on tokens
    # None if this rank does not run the step
    value: Tensor | None = None
    # where the left model has this rank's value
    placed: Placed | None = None
    # by rank: Placed.kind of the value; "" if the left lacks the value
    kinds: dict[int, str] = field(default_factory=dict)
    # sum of the value over all ranks, if the left lacks the value
    sum: Tensor | None = None
    sum_placed: Placed | None = None  # where the left model has the sum

    @property
    def kind(self) -> str:
        """Return the value's kind; "" if a rank's value is not on the left."""
        if self.sum_placed is not None:
            return PART_OF_SUM
        return min(self.kinds.values(), default="whole")

    @property
    def collective(self) -> str:
        """Return "reduces" or "gathers" for a collective, otherwise ""."""
        if any(name in self.op for name in REDUCES):
            return "reduces"
        return "gathers" if any(name in self.op for name in GATHERS) else ""


@dataclass(frozen=True)
class Parting:
    """The first step that differs, as one rank sees it."""

    name: str
    steps: Mapping[str, Step]  # all steps that lead to the scores
    wholes: Mapping[int, Whole]  # the values of the left, by number
    run: Run  # the left, and this rank's part of the right

    @property
    def step(self) -> Step:
        """Return the step that differs first."""
        return self.steps[self.name]

    @property
    def value(self) -> Tensor:
        """Return the value that this rank computes in the step."""
        assert self.step.value is not None
        return self.step.value

    @property
    def inputs(self) -> list[Step]:
        """Return the steps whose values the first differing step uses."""
        return [self.steps[name] for name in self.step.inputs]

    @property
    def known(self) -> list[tuple[Step, Placed]]:
        """Return the inputs that the left has, each with its place there."""
        return [(s, s.placed) for s in self.inputs if s.placed is not None]

    @property
    def after(self) -> list[tuple[Step, Placed, Value]]:
        """Return what the left model computes from the known inputs.

        Each entry has the step that computes the input, the input's place in
        the left model, and the left's result of the same operation.
        """
        return [
            (one, placed, value)
            for one, placed in self.known
            for value in self.run.left.values
            if placed.of.number in value.inputs
            and value.place.op == self.step.op
        ]

    @cached_property
    def expected(self) -> list[tuple[Value, Placed, Tensor]]:
        """Return the values that this rank should compute in this step."""
        found = []
        for _, placed, of in self.after:
            if of.number in self.wholes and of.shape == placed.of.shape:
                want = placed.part_of(self.wholes[of.number].tensor)
                if want.numel() == self.value.numel():
                    found.append((of, placed, want))
        return found

    @property
    def continued(self) -> str:
        """Say where the left model continues, in words that end a sentence."""
        at = [of.place for of, *_ in self.expected]
        return f"; the left continues at {at[-1]}" if at else ""


def causes(parting: Parting) -> Iterator[str]:
    """Yield the causes that this rank finds for a difference, likeliest first.

    A rank that does not run the step finds no causes.
    """
    if parting.step.value is not None:
        for explanation in EXPLANATIONS:
            yield from explanation(parting)


def _added_on_every_rank(parting: Parting) -> Iterator[str]:
    step, run = parting.step, parting.run
    readers = [s for s in parting.steps.values() if parting.name in s.inputs]
    if step.sum is None or all(s.collective != "reduces" for s in readers):
        return
    added = {one.place: one.value for one in parting.inputs}
    for weight, p in run.part.named_parameters():
        added[f"the bias {weight}"] = plain(local(p))
    shapes, count = (step.sum.shape, step.sum.shape[-1:]), run.ranks.count
    for what, value in added.items():
        if value is None or value.shape not in shapes:
            continue
        total = step.sum - (count - 1) * value
        if find(total, step.op, parting.wholes.values()):
            yield (
                f"every rank adds {what}, so the sum over the ranks contains "
                f"it {count} times"
            )


def _missing_sum(parting: Parting) -> Iterator[str]:
    for one in [*parting.inputs, parting.step]:
        if one.sum_placed is not None and parting.step.collective != "reduces":
            yield (
                f"an all_reduce is missing: {one.place} is a part of a sum "
                f"on each rank, and is used before it is summed; the sum over "
                f"the ranks is {one.sum_placed.of.name} on the left"
            )


def _not_put_back(parting: Parting) -> Iterator[str]:
    placed = parting.step.placed
    if placed is not None:
        yield (
            f"the numbers are those of {placed.of.name}, in another order or "
            f"a part of them: {placed}; {PUT_BACK}"
        )


def _cut_as_one(parting: Parting) -> Iterator[str]:
    for (one, first), (_, second) in permutations(parting.known, 2):
        pointwise = parting.step.op in POINTWISE
        if not pointwise and first.of is second.of and first != second:
            yield (
                f"{one.place} and its other input are both parts of "
                f"{first.of.name}, {first} and {second}: is a fused weight of "
                f"queries, keys and values cut as if it were a single one?"
            )


def _other_positions(parting: Parting) -> Iterator[str]:
    own = f"rank {parting.run.ranks.rank} counts positions from 0"
    for (one, first), (other, second) in permutations(parting.known, 2):
        if parting.step.op not in POINTWISE or not one.judged:
            continue
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


def _other_layer(parting: Parting) -> Iterator[str]:
    run, after = parting.run, parting.after
    to = {of.place.module for _, _, of in after} & {*map(owner, run.weights)}
    owners = {owner(n): owner(source) for n, (source, _) in run.pieces.items()}
    own = owners.get(parting.step.module, "")
    if own and to and own not in to:
        yield (
            f"{own} takes {after[0][0].place}, which on the left is the input "
            f"of {min(to)}: do layers, or stages, run in another order?"
        )


def _other_mask(parting: Parting) -> Iterator[str]:
    for of, placed, want in parting.expected:
        if words := _mask(parting.value, want, placed):
            yield f"{words}; the left continues at {of.place}"


def _input_in_another_order(parting: Parting) -> Iterator[str]:
    for one, placed in parting.known:
        if placed.kind == OTHER:
            yield (
                f"its input {one.place} is that of {placed.of.name} in "
                f"another order ({placed}): {PUT_BACK}{parting.continued}"
            )


def _unknown(parting: Parting) -> Iterator[str]:
    made = ", ".join(
        f"{one.place} is {placed.of.name} ({placed})"
        for one, placed in parting.known
    )
    made = f"; of its inputs, {made}" if made else ""
    yield f"no value on the left equals it or its sum{made}{parting.continued}"


# Each function yields a sentence about one cause, or nothing.
EXPLANATIONS: tuple[Callable[[Parting], Iterator[str]], ...] = (
    _added_on_every_rank,
    _missing_sum,
    _not_put_back,
    _cut_as_one,
    _other_positions,
    _other_layer,
    _other_mask,
    _input_in_another_order,
    _unknown,
)


def owner(name: str) -> str:
    """Return the name of the module that holds a parameter."""
    return name.rpartition(".")[0]


def _mask(value: Tensor, want: Tensor, placed: Placed) -> str:
    """Say where a rank's mask differs from the left's; "" if nowhere."""
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
        return (
            f"{words}; the keys are in the order {order}: is the mask in "
            f"the same order?"
        )
    if at < query and own == as_runs(range(at + 1)):
        return f"{words}: the mask counts a rank's positions from 0"
    return words
