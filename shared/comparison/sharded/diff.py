"""Runs both models on all ranks, and says where they part."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...invariants.context import one_run
from ...invariants.errors import UnusableModel
from ...invariants.model.building import Builder
from ...invariants.ranks import Ranks, current, on_any, together
from ..values.diff import beside_scores, run_beside
from ..values.given import (
    SEED,
    Model,
    as_tokens,
    size_of,
    subjects_of,
    tokens_of_both,
)
from ..values.recording import Recording
from ..values.side import Side, run_in_one_dtype, unit_of
from ..values.value import plain
from .causes import Step, cause
from .gradients import compare_gradients
from .placing import OTHER, Finder
from .weights import put_weights, sources_of

DATA_PARALLEL = {"DistributedDataParallel", "FSDPModule"}


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
    left: Model | Path,
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
    right, in float64 where both can. A left that no process can hold beside
    its part is a recording, which each rank reads: the right loads its own
    weights, and runs in the recording's dtype.

    Args:
        left: builds a module, or is one; or the path of a recording.
        right: builds the module of a rank, or is one.
        tokens: ids; None: 16 drawn from a seed, or the recording's.
        vocab_size: number of tokens, where a model does not declare it.
        names: what to call the two.
        dtype: to run both in; None: float64.
        gradients: whether to compare the gradients of the weights, too.

    Raises:
        ValueError: for a single process, for models that are no modules,
            raise, or have other vocabularies, for weights that do not fit,
            and for a recording of other tokens.
    """
    ranks = current()
    if ranks is None:
        raise ValueError("a sharded model is compared on several processes")
    ranks.apart = 0.0, ""
    given = None if tokens is None else as_tokens(tokens)
    built = _built(right, names[1])
    sides: tuple[Side, Side]
    if isinstance(left, Path):
        whole, recording = None, Recording(left)
        if given is not None and not given.equal(recording.tokens):
            raise ValueError(f"{left} was recorded from other tokens")
        subject = beside_scores(built, recording, vocab_size)
        sides = run_beside(subject, recording, dtype, Rank)[::-1]
        weights = "the ranks have their own weights"
        sources = sources_of(recording.stored, built, ranks.count)
    else:
        whole = _built(left, names[0])
        with together("putting weights"):
            weights, sources = put_weights(whole, built, ranks)
        one, other = subjects_of((whole, built), size_of(given), vocab_size)
        given = tokens_of_both((one, other), names, given)
        sides = Side(one, given, dtype), Rank(other, given, dtype)
        run_in_one_dtype(sides)
    with together("the comparison"):
        found = _compare(sides, ranks, weights, sources)
    if not (gradients and found.same):
        return found
    with together("the gradients"):
        return _with_gradients(found, sides, (whole, built), sources, ranks)


def _with_gradients(
    found: ShardedDiff,
    sides: tuple[Side, Side],
    modules: tuple[nn.Module | None, nn.Module],
    sources: Mapping[str, str],
    ranks: Ranks,
) -> ShardedDiff:
    """Add the first gradient that differs.

    A model that is data parallel has another text on each rank, and the mean
    of their gradients: with one text nothing would show a parameter that is
    left out.
    """
    whole, built = modules
    own_text = whole is not None and _is_data_parallel(built)
    if own_text:
        vocab_size = sides[1].scores.size(-1)
        for side in sides:
            side.tokens = (side.tokens + ranks.rank) % vocab_size
    ranks.own_texts = own_text
    ours, theirs = (side.gradients() for side in sides)
    ranks.own_texts = False
    if whole is not None:  # also of tied weights, and of those without
        weights = dict(whole.named_parameters(remove_duplicate=False))
        known = {id(weights[name]): grad for name, grad in ours.items()}
        ours = {
            name: known.get(id(w), torch.zeros_like(w).cpu())
            for name, w in weights.items()
        }
    if own_text:
        ours = {n: g / ranks.count for n, g in ranks.sums(ours).items()}
    parameters = {
        name: p
        for name, p in built.named_parameters()
        if sources.get(name) in ours
    }
    if on_any(bool(parameters) and not theirs):
        return found
    count, partial, gradient = compare_gradients(
        ours,
        theirs,
        parameters,
        sources,
        ranks,
        min(unit_of(*sides), 2.0**-16),
    )
    if gradient and own_text:
        gradient += (
            "; each rank ran a text of its own, and the left's is the mean "
            "over them: does anything reduce it?"
        )
    return replace(
        found,
        same=not gradient,
        gradients=count,
        partial_gradients=tuple(partial),
        gradient=gradient,
    )


def _is_data_parallel(model: nn.Module) -> bool:
    """Whether every rank is meant to have a text of its own."""
    kinds = {
        kind.__name__ for m in model.modules() for kind in type(m).__mro__
    }
    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    one_axis = all(mesh is None or mesh.ndim == 1 for mesh in meshes)
    return bool(kinds & DATA_PARALLEL) and one_axis


def _built(model: Model | Path, name: str) -> nn.Module:
    """Return a module, or raise ValueError."""
    if isinstance(model, Path):
        raise ValueError(f"{name} is a recording: it stands on the left")
    try:
        built = Builder(model, SEED, None).build()
    except UnusableModel as error:
        raise ValueError(str(error)) from error.__cause__
    if not isinstance(built, nn.Module):
        raise ValueError(f"{name} is no module, whose weights can be set")
    return built


def _compare(
    sides: tuple[Side, Side],
    ranks: Ranks,
    weights: str,
    sources: Mapping[str, str],
) -> ShardedDiff:
    left, right = sides
    finder = _values_of(left)
    numbers = _numbers(right.lines, ranks)
    steps, last = _steps(right, numbers, ranks)
    assert right.kept is not None
    kept = {numbers[e]: plain(value) for e, value in right.kept.items()}
    _place(steps, kept, finder, ranks)
    wanted, near = finder.values[left.last], finder.near[left.last]
    apart = float((right.scores - wanted).abs().max())
    same = apart <= near and ranks.apart[0] <= 1
    if not same and kept[last].shape == wanted.shape:
        # where ranks return others, the scores above are rank 0's on all
        apart = max(apart, float((kept[last] - wanted).abs().max()))
    judged = [step for step in steps.values() if step.judged]
    kinds = [{*step.kinds.values()} for step in judged if not step.lost_on]
    result = ShardedDiff(
        ranks=ranks.count,
        same=same,
        apart=max(ranks.gather(apart)),
        rounding=near,
        values=len(judged),
        matched=sum(step.matched for step in judged),
        sliced=sum("sliced" in kind for kind in kinds),
        reordered=sum(kind & {"sliced", OTHER} == {OTHER} for kind in kinds),
        partial=sum(step.partial for step in judged),
        weights=weights,
    )
    if result.same:
        return result
    event = _parting(steps, last)
    step, module = steps[event], right.module()
    parameters = dict(module.named_parameters()) if module else {}
    if step.matched:
        step.placed = finder.find(right.scores, "")
    causes = ranks.gather(
        cause(event, steps, kept, finder, left, parameters, sources, ranks)
    )
    bad = step.lost_on or [*range(ranks.count)]
    words = causes[bad[0]]
    if len(bad) < ranks.count:
        words = f"rank {bad[0]}" + (f": {words}" if words else "")
    return replace(result, where=step.place, cause=words)


def _values_of(left: Side) -> Finder:
    """Return the values of the left, those of products also unbiased.

    Ranks sum up before they add a bias.
    """
    known = {v.number: v for v in left.values if not v.digest.trivial}
    values = left.keep({*known, left.last})
    ops = {v.number: v.place.op for v in left.values}
    module = left.module()
    biases = dict(module.named_parameters()) if module else {}
    for number, value in known.items():
        bias = biases.get(f"{value.place.module}.bias")
        if bias is None or value.place.op not in ("linear", "addmm"):
            continue
        if bias.numel() == value.shape[-1]:
            without = number + len(left.values)
            values[without] = values[number] - plain(bias)
            ops[without] = value.place.op
    return Finder(values, ops, torch.finfo(left.dtype).eps)


def _place(
    steps: dict[int, Step],
    kept: Mapping[int, Tensor],
    finder: Finder,
    ranks: Ranks,
) -> None:
    """Find each step on the left; of one that is lost the ranks' sum."""
    own = {}
    for event in kept.keys() & steps.keys():
        step = steps[event]
        if step.distinct:
            step.placed = finder.find(kept[event], step.op)
        kind = step.placed.kind if step.placed else ""
        own[str(event)] = kind, [*kept[event].shape]
    summed = dict[str, Tensor]()
    for name, of_each in ranks.by_name(own).items():
        step = steps[int(name)]
        step.kinds = {i: one[0] for i, one in enumerate(of_each) if one}
        shapes = [one and one[1] for one in of_each]
        alike = None not in shapes and shapes.count(shapes[0]) == len(shapes)
        if step.judged and step.lost_on and alike:
            summed[name] = kept[int(name)]
    for name, total in ranks.sums(summed).items():
        step = steps[int(name)]
        step.sum, step.sum_placed = total, finder.find(total, step.op)


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
    order, *others = ranks.gather(own)
    for keys in others:
        at, known = len(order), {key: i for i, key in enumerate(order)}
        added: dict[int, list[str]] = {}
        for key in reversed(keys):
            if key in known:
                at = known[key]
            else:  # a later stage runs before what all do next
                added.setdefault(at, []).insert(0, key)
        parts = [[*added.get(i, ()), key] for i, key in enumerate(order)]
        order = [*chain(*parts), *added.get(len(parts), ())]
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
    own = {
        str(events[v.number]): {
            "place": str(v.place),
            "op": v.place.op,
            "module": v.place.module,
            "inputs": [events[n] for n in v.inputs],
            "distinct": v.place.in_model and not v.digest.trivial,
            "constant": v.constant,
        }
        for v in right.values
    }
    steps: dict[int, Step] = {}
    for event, of_each in ranks.by_name(own).items():
        found = [one for one in of_each if one]
        steps[int(event)] = Step(
            found[0]["place"],
            found[0]["op"],
            found[0]["module"],
            inputs={n for one in found for n in one["inputs"]},
            distinct=all(one["distinct"] for one in found),
            constant=all(one["constant"] for one in found),
        )
    # a rank that adds 0 takes its last step for a copy of the one before
    ends = ranks.gather(events[last.number])
    sent = ranks.gather([events[n] for n in right.sent])
    wanted, todo = set[int](), [*ends, *chain(*sent)]
    while todo:
        event = todo.pop()
        if event not in wanted and event in steps:
            wanted.add(event)
            todo += steps[event].inputs
    return {e: steps[e] for e in sorted(wanted)}, max(ends)


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
