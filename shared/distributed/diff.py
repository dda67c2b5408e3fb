"""Compare a sharded model with its original, on all ranks."""

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

from ..comparison.values.diff import subjects_of
from ..comparison.values.given import (
    SEED,
    Model,
    as_tokens,
    size_of,
    tokens_of_both,
)
from ..comparison.values.pair import run_beside
from ..comparison.values.recording import Recording
from ..comparison.values.side import Side, run_in_one_dtype
from ..running.context import one_run
from ..running.model.building import Builder
from ..running.ranks import current, together
from ..tracing.value import plain
from .causes import PART_OF_SUM, Parting, Step, causes
from .parameters import Run, compare_gradients, pieces_of, put_weights
from .placing import OTHER, Whole, find, on_all_ranks


@dataclass(frozen=True)
class ShardedDiff:
    """A comparison of a sharded model with its original on one process."""

    ranks: int  # number of ranks
    # whether scores, and gradients if compared, equal the left's on all ranks
    same: bool
    apart: float  # largest distance between a rank's scores and the left's
    rounding: float  # the difference that rounding can cause
    values: int  # how many values of the sharded model lead to its scores
    matched: int  # how many of these the left has, perhaps as a sum
    sliced: int  # how many matched values are slices or reordered
    partial: int  # how many matched values are parts of a sum
    weights: str = ""  # which weights the ranks ran with, in words
    where: str = ""  # the first line that differs
    cause: str = ""  # a likely cause at that line, if one is known
    gradients: int = 0  # how many gradients were compared
    # gradients that are complete only as a sum over ranks, by name
    partial_gradients: tuple[str, ...] = ()
    gradient: str = ""  # how the first unequal gradient differs, in words

    @property
    def sentence(self) -> str:
        """Return the finding in one sentence."""
        count = (
            f"{self.matched} of {self.values} values matched ({self.sliced} "
            f"sliced, {self.partial} partial sums)"
        )
        if self.same or self.gradient:
            sums = len(self.partial_gradients)
            equal = f"{self.gradients} gradients equal" + (
                f", {sums} of them as the sum over the ranks, which the "
                f"training code must compute" * bool(sums)
            )
            if not self.gradients:
                equal = "gradients were not compared"
            return (
                f"one function over {self.ranks} ranks"
                f"{', another gradient' * bool(self.gradient)}: "
                f"{self.gradient or equal}; {count}; scores {self.apart:.1g} "
                f"apart, rounding can cause up to {self.rounding:.1g}; "
                f"{self.weights}"
            )
        return (
            f"two functions over {self.ranks} ranks: they first differ at "
            f"{self.where}: {self.cause}; scores {self.apart:.2g} apart, "
            f"{count}; {self.weights}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return vars(self) | {"sentence": self.sentence}


class Rank(Side):
    """The model on one rank; all values of its first run are kept.

    They are kept because DTensor caches results, so a second run may run other
    operations.
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
    """Compare a model on one process with the same model on several ranks.

    All ranks call this function. Each rank runs the whole left model and its
    own part of the right model, in float64 if both can. If the left model is
    too large for this, give a recording of it, which each rank reads. Then the
    right must load its weights itself, and runs in the recording's dtype.

    Args:
        left: a module, a function that builds one, or the path of a
            recording.
        right: the module of a rank, or a function that builds it.
        tokens: ids; None draws 16 from a seed, or uses the recording's.
        vocab_size: number of tokens, if a model does not declare it.
        names: names of the two models, for messages.
        dtype: dtype to run both in; None means float64.
        gradients: whether to compare the gradients of the weights as well.

    Raises:
        ValueError: for a single process, a model that is not a module or
            raises, different vocabularies, weights that do not fit, or a
            recording of other tokens.
    """
    ranks = current()
    if ranks is None:
        raise ValueError("comparing a sharded model requires several ranks")
    ranks.apart = 0.0, ""
    given = None if tokens is None else as_tokens(tokens)
    part = _built(right, names[1])
    sides: tuple[Side, Side]
    if isinstance(left, Path):
        recording = Recording(left)
        if given is not None and not given.equal(recording.tokens):
            raise ValueError(f"{left} was recorded from other tokens")
        at = size_of(recording.tokens)
        _, subject = subjects_of((recording, part), at, vocab_size)
        sides = run_beside(subject, recording, dtype, Rank)[::-1]
        weights = dict[str, Tensor]()
        words = "the ranks have their own weights"
        pieces = pieces_of(recording.stored, part, ranks)
    else:
        whole = _built(left, names[0])
        weights = dict(whole.named_parameters(remove_duplicate=False))
        with together("putting weights"):
            words, pieces = put_weights(weights, part, ranks)
        one, other = subjects_of((whole, part), size_of(given), vocab_size)
        given = tokens_of_both((one, other), names, given)
        sides = Side.run(one, given, dtype), Rank.run(other, given, dtype)
        run_in_one_dtype(sides)
    run = Run(sides[0], sides[1], weights, part, pieces, ranks)
    with together("the comparison"):
        found = replace(_compare(run), weights=words)
    if gradients and found.same:
        with together("the gradients"):
            found = replace(found, **compare_gradients(run))
    return found


def _built(model: Model | Path, name: str) -> nn.Module:
    recorded = isinstance(model, Path)
    built = None if recorded else Builder(model, SEED, None).build()
    if not isinstance(built, nn.Module):
        raise ValueError(
            f"{name} is not a module, so its weights cannot be set"
            f"{': give a recording as the left side' * recorded}"
        )
    return built


def _compare(run: Run) -> ShardedDiff:
    left, right, ranks = run.left, run.right, run.ranks
    wholes = _values_of(run)
    steps = _steps(run, wholes)
    wanted, near = wholes[left.last].tensor, wholes[left.last].near
    apart = float((right.scores - wanted).abs().max())
    same = apart <= near and ranks.apart[0] <= 1
    own = [*steps.values()][-1].value
    if not same and own is not None and own.shape == wanted.shape:
        # also compare this rank's own scores: `right.scores` are rank 0's
        apart = max(apart, float((own - wanted).abs().max()))
    kinds = Counter(step.kind for step in steps.values() if step.judged)
    result = ShardedDiff(
        ranks=ranks.count,
        same=same,
        apart=max(ranks.gather(apart)),
        rounding=near,
        values=kinds.total(),
        matched=kinds.total() - kinds[""],
        sliced=kinds["sliced"] + kinds[OTHER],
        partial=kinds[PART_OF_SUM],
    )
    if result.same:
        return result
    name = _parting(steps)
    step = steps[name]
    if step.kind:
        step.placed = find(right.scores, "", wholes.values())
    parting = Parting(name, steps, wholes, run)
    words = ranks.gather(next(causes(parting), ""))
    lost_on = [rank for rank, kind in step.kinds.items() if not kind]
    cause = words[min(lost_on, default=0)]
    if 0 < len(lost_on) < ranks.count:
        cause = f"rank {lost_on[0]}: {cause}"
    return replace(result, where=step.place, cause=cause)


def _values_of(run: Run) -> dict[int, Whole]:
    """Return the left's values, and its matrix products without a bias.

    Ranks sum their products before they add the bias.
    """
    left = run.left
    known = {v.number for v in left.values if not v.digest.trivial}
    found, eps = dict[int, Whole](), torch.finfo(left.dtype).eps
    for n, value in left.keep({*known, left.last}).items():
        place = left.values[n].place
        found[n] = Whole(n, str(place), place.op, value, eps)
        bias = run.weights.get(f"{place.module}.bias")
        if bias is None or bias.shape != value.shape[-1:]:
            continue
        if place.op in ("linear", "addmm"):
            name, without = f"{place} without its bias", value - plain(bias)
            found[~n] = Whole(~n, name, place.op, without, eps)
    return found


def _steps(run: Run, wholes: Mapping[int, Whole]) -> dict[str, Step]:
    """Return the steps that lead to the scores on any rank, scores last.

    A step's name is its line, and how often the line has run so far. Ranks may
    run different lines, for example if the experts of a rank get no token.
    Each value, or else its sum over the ranks, is looked up in the left model.
    """
    right, ranks = run.right, run.ranks
    often, names = Counter[str](), dict[int, str]()
    for event, line in right.lines.items():
        often[line] += 1
        names[event] = f"{often[line]} {line}"
    last = right.values[right.last]
    while not last.place.in_model and last.inputs:
        last = right.values[last.inputs[0]]
    own = {
        names[v.event]: [
            *(str(v.place), v.place.op, v.place.module),
            [names[right.values[n].event] for n in v.inputs],
            v.place.in_model and not v.digest.trivial,
            not v.constant,
        ]
        for v in right.values
    }
    every = dict[str, Step]()
    for name, of_each in ranks.by_name(own).items():
        place, op, module, inputs, distinct, moves = zip(
            *filter(None, of_each), strict=True
        )
        every[name] = Step(
            *(place[0], op[0], module[0], dict.fromkeys(chain(*inputs))),
            distinct=all(distinct),
            judged=all(distinct) and any(moves),
        )
    ends = ranks.gather(names[last.event])
    sent = ranks.gather([names[right.values[n].event] for n in right.sent])
    # steps still to visit, as a stack: values sent by ranks, then the last
    # scores
    todo = [*ends, *[*chain(*sent)][::-1]]
    steps, seen = dict[str, Step](), set[str]()
    while todo:
        if (name := todo[-1]) in seen:
            steps[name] = every[todo.pop()]
        else:
            seen.add(name)
            todo += [n for n in every[name].inputs if n not in seen][::-1]
    assert right.kept is not None
    placed = dict[str, tuple[str, Tensor | None]]()
    for event, value in right.kept.items():
        if (step := steps.get(names[event])) is not None:
            step.value = plain(value)
            if step.distinct:
                step.placed = find(step.value, step.op, wholes.values())
            kind = step.placed.kind if step.placed else ""
            placed[names[event]] = kind, step.value if step.judged else None
    kinds, sums = on_all_ranks(placed, ranks)
    for name, step in steps.items():
        step.kinds = kinds.get(name, {})
        if name in sums:
            step.sum = sums[name]
            step.sum_placed = find(step.sum, step.op, wholes.values())
    return steps


def _parting(steps: Mapping[str, Step]) -> str:
    """Return the first step that neither computes nor leads to a left value.

    A step that leads to a left value only computes this value in another way.
    Gathered values do not count, because each part comes from one rank.
    """
    explained = set[str]()
    for name, step in reversed([*steps.items()]):
        shows = step.judged and step.kind and step.collective != "gathers"
        if shows or name in explained:
            explained.update(step.inputs)
    for name, step in steps.items():
        if step.judged and not step.kind and name not in explained:
            return name
    return name
