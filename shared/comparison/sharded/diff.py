"""Runs both models on all ranks, and says where they part."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...invariants.context import one_run
from ...invariants.errors import UnusableModel
from ...invariants.model.building import Builder
from ...invariants.ranks import Ranks, current, together
from ..values.given import (
    SEED,
    Model,
    as_tokens,
    size_of,
    subjects_of,
    tokens_of_both,
)
from ..values.side import Side, run_in_one_dtype, unit_of
from ..values.value import plain
from .causes import Step, cause
from .gradients import compare_gradients
from .placing import Finder
from .weights import put_weights


@dataclass(frozen=True)
class ShardedDiff:
    """A comparison of a sharded model with its original on one process.

    Attributes:
        ranks: how many processes.
        same: whether all ranks return the left's scores, and have its
            gradients, where they were compared.
        apart: how far the scores of a rank are from the left's, at most;
            inf for other shapes, and rounding: how far that may be.
        values: how many values of the sharded model lead to its scores.
        matched: how many of them the left has, or a sum of all ranks is the
            left's; sliced, reordered and partial: how many of these are a
            part of a value of the left's on some rank, are one in another
            order, or are a part of a sum.
        where: the line that parts, and cause: what is seen there.
        weights: which weights the ranks ran with.
        gradients: how many were compared; partial_gradients: the names of
            those that are parts of a sum over the ranks; gradient: how the
            first one differs.
    """

    ranks: int
    same: bool
    apart: float
    rounding: float
    values: int
    matched: int
    sliced: int
    reordered: int
    partial: int
    weights: str
    where: str = ""
    cause: str = ""
    gradients: int = 0
    partial_gradients: tuple[str, ...] = ()
    gradient: str = ""

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        order = self.reordered
        more = f", {order} in another order" if order else ""
        count = (
            f"{self.matched} of {self.values} values matched ({self.sliced} "
            f"sliced{more}, {self.partial} partial sums)"
        )
        if self.same or self.gradient:
            return (
                f"one function over {self.ranks} ranks"
                f"{', another gradient' * bool(self.gradient)}: "
                f"{self._of_gradients}; {count}; scores {self.apart:.1g} "
                f"apart, rounding can cause up to {self.rounding:.1g}; "
                f"{self.weights}"
            )
        where = f" at {self.where}" if self.where else ""
        cause = f": {self.cause}" if self.cause else ""
        return (
            f"two functions over {self.ranks} ranks: they part{where}{cause}; "
            f"scores {self.apart:.2g} apart, {count}; {self.weights}"
        )

    @property
    def _of_gradients(self) -> str:
        parts = len(self.partial_gradients)
        if not self.gradients:
            return "gradients are not compared"
        return self.gradient or (
            f"{self.gradients} gradients equal"
            + f", {parts} of them as the sum over the ranks, which the "
            f"training code has to make" * bool(parts)
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return vars(self) | {"sentence": self.sentence}


class Rank(Side):
    """A rank's part: operations of a second run need not be the same.

    DTensor keeps what it has found out of them.
    """

    most = math.inf


@one_run
def diff_sharded(
    left: Model,
    right: Model,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
    names: tuple[str, str],
    dtype: torch.dtype | None = None,
    gradients: bool = False,
) -> ShardedDiff:
    """Compare a model on one process with the same over several ranks.

    All ranks call this. Each runs the whole of the left, and its part of the
    right, in float64 where both can.

    Args:
        left: builds a module, or is one.
        right: builds the module of a rank, or is one.
        tokens: ids; None: 16 drawn from a seed.
        vocab_size: number of tokens, where a model does not declare it.
        names: what to call the two.
        dtype: to run both in; None: float64.
        gradients: whether to compare the gradients of the weights, too.

    Raises:
        ValueError: for a single process, for models that are no modules,
            raise, or have other vocabularies, and for weights that do not
            fit.
    """
    ranks = current()
    if ranks is None:
        raise ValueError("a sharded model is compared on several processes")
    given = None if tokens is None else as_tokens(tokens)
    built = tuple(
        _built(m, n) for m, n in zip((left, right), names, strict=True)
    )
    with together("putting weights"):
        weights, sources = put_weights(built[0], built[1], ranks)
    subjects = subjects_of((built[0], built[1]), size_of(given), vocab_size)
    given = tokens_of_both(subjects, names, given)
    ranks.apart = 0.0, ""
    sides = Side(subjects[0], given, dtype), Rank(subjects[1], given, dtype)
    run_in_one_dtype(sides)
    with together("the comparison"):
        found = _compare(sides, ranks, weights)
    if not (gradients and found.same):
        return found
    with together("the gradients"):
        count, partial, gradient = compare_gradients(
            sides[0].gradients(),
            sides[1].gradients(),
            (built[0], built[1]),
            sources,
            ranks,
            min(unit_of(*sides), 2.0**-16),
        )
    return replace(
        found,
        same=not gradient,
        gradients=count,
        partial_gradients=tuple(partial),
        gradient=gradient,
    )


def _built(model: Model, name: str) -> nn.Module:
    """Return a module, or raise ValueError."""
    try:
        built = Builder(model, SEED, None).build()
    except UnusableModel as error:
        raise ValueError(str(error)) from error.__cause__
    if not isinstance(built, nn.Module):
        raise ValueError(f"{name} is no module, whose weights can be set")
    return built


def _compare(
    sides: tuple[Side, Side], ranks: Ranks, weights: str
) -> ShardedDiff:
    left, right = sides
    known = [v for v in left.values if not v.digest.trivial]
    eps = torch.finfo(left.dtype).eps
    values = left.keep({v.number for v in known} | {left.last})
    ops = {v.number: v.place.op for v in left.values}
    ours = left.module()
    biases = dict(ours.named_parameters()) if ours else {}
    for value in known:  # ranks sum up before they add a bias
        name = f"{value.place.module}.bias"
        if value.place.op in ("linear", "addmm") and name in biases:
            bias = plain(biases[name])
            if bias.numel() == value.shape[-1]:
                number = value.number + len(left.values)
                values[number] = values[value.number] - bias
                ops[number] = value.place.op
    finder = Finder(values, ops, eps)
    common = _numbers(right.lines, ranks)
    steps, last = _steps(right, common, ranks)
    assert right.kept is not None
    kept = {common[e]: plain(value) for e, value in right.kept.items()}
    scores = right.scores
    for event, step in steps.items():
        if step.inside and not step.trivial and event in kept:
            step.placed = finder.find(kept[event], step.op)
    found = ranks.texts(
        json.dumps([e for e in steps if e in kept and not steps[e].placed])
    )
    lost = [{*json.loads(text)} for text in found]
    for event, step in steps.items():
        step.lost_on = [rank for rank, own in enumerate(lost) if event in own]
        if not (step.judged and step.lost_on):
            continue
        shapes = ranks.texts(f"{event in kept and [*kept[event].shape]}")
        if len({*shapes}) == 1 and event in kept:
            step.sum = ranks.summed(kept[event])
            step.sum_placed = finder.find(step.sum, step.op)
    wanted, near = finder.values[left.last], finder.near[left.last]
    apart = float((scores - wanted).abs().max())
    same = apart <= near and ranks.apart[0] <= 1
    if not same and kept[last].shape == wanted.shape:
        # where ranks return others, the scores above are rank 0's on all
        apart = max(apart, float((kept[last] - wanted).abs().max()))
    apart = max(map(float, ranks.texts(repr(apart))))
    scored = finder.find(scores, "")
    judged = [s for s in steps.values() if s.judged]
    kinds = ranks.texts(
        json.dumps([s.placed.kind if s.placed else "" for s in judged])
    )
    of_each = [{*kind} for kind in zip(*map(json.loads, kinds), strict=True)]
    matched = [k for k in of_each if "" not in k]
    sums = sum(s.partial for s in judged)
    result = ShardedDiff(
        ranks=ranks.count,
        same=same,
        apart=apart,
        rounding=near,
        values=len(judged),
        matched=len(matched) + sums,
        sliced=sum("sliced" in kind for kind in matched),
        reordered=sum(
            "another order" in kind and "sliced" not in kind
            for kind in matched
        ),
        partial=sums,
        weights=weights,
    )
    if result.same:
        return result
    event = _parting(steps, last)
    module = right.module()
    vectors = {
        name: p.detach().double()
        for name, p in (module.named_parameters() if module else ())
        if p.dim() == 1
    }
    if steps[event].matched:
        steps[event].placed = scored
    own = cause(event, steps, kept, finder, left, vectors, ranks)
    causes = ranks.texts(own)
    bad = steps[event].lost_on or [*range(ranks.count)]
    words = causes[bad[0]]
    if len(bad) < ranks.count:
        words = f"rank {bad[0]}" + (f": {words}" if words else "")
    return ShardedDiff(
        **vars(result) | {"where": steps[event].place, "cause": words}
    )


def _numbers(lines: dict[int, str], ranks: Ranks) -> dict[int, int]:
    """Return a number of each event that is the same on all ranks.

    A rank may run fewer lines than the others: no token may be sent to its
    experts. A line, and how often it has run by then, identify an event.
    """
    often = Counter[str]()
    own = []
    for line in lines.values():
        often[line] += 1
        own.append(f"{often[line]} {line}")
    order, *others = map(json.loads, ranks.texts(json.dumps(own)))
    for keys in others:
        at, known = 0, {key: i for i, key in enumerate(order)}
        added: dict[int, list[str]] = {}
        for key in keys:
            if key in known:
                at = known[key] + 1
            else:
                added.setdefault(at, []).append(key)
        parts = [[*added.get(i, ()), key] for i, key in enumerate(order)]
        order = [key for part in parts for key in part]
        order += added.get(len(parts), [])
    numbers = {key: i for i, key in enumerate(order)}
    return {e: numbers[key] for e, key in zip(lines, own, strict=True)}


def _steps(
    right: Side, number: dict[int, int], ranks: Ranks
) -> tuple[dict[int, Step], int]:
    """Return what leads to the scores on some rank, by event; the scores'.

    One that a rank takes for a copy of another has its place from the rank
    that does not.
    """
    events = {v.number: number[v.event] for v in right.values}
    last = right.values[right.last]
    while not last.place.in_model and last.inputs:
        last = right.values[last.inputs[0]]
    own = [
        [
            events[v.number],
            str(v.place),
            v.place.op,
            [events[n] for n in v.inputs],
            v.digest.trivial,
            v.constant,
            v.place.in_model,
        ]
        for v in right.values
    ]
    steps: dict[int, Step] = {}
    for text in ranks.texts(json.dumps(own)):
        for event, place, op, inputs, trivial, constant, inside in json.loads(
            text
        ):
            step = steps.setdefault(event, Step(place, op))
            step.inputs.update(inputs)
            step.trivial |= trivial
            step.constant &= constant
            step.inside = inside
    # a rank that adds 0 takes its last step for a copy of the one before
    end = max(map(int, ranks.texts(str(events[last.number]))))
    wanted, todo = set[int](), [end]
    while todo:
        event = todo.pop()
        if event not in wanted and event in steps:
            wanted.add(event)
            todo += steps[event].inputs
    return {e: steps[e] for e in sorted(wanted)}, end


def _parting(steps: dict[int, Step], last: int) -> int:
    """Return the first event that the left lacks, and that matters.

    One that leads to what the left has is a step on another way to it. A
    gathered part comes from one rank alone, so it shows nothing of others.
    """
    reaches: dict[int, bool] = dict.fromkeys(steps, False)
    for event in reversed(steps):
        step = steps[event]
        shows = step.judged and step.matched and not step.gathers
        passes = not step.matched or step.gathers or not step.judged
        if shows or (passes and reaches[event]):
            for before in step.inputs:
                if before in reaches:
                    reaches[before] = True
    for event, step in steps.items():
        if step.judged and not step.matched and not reaches[event]:
            return event
    return last
