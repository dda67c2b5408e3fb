"""Record a model of a comparison, and run it again with changes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...running.context import isolated, one_run
from ...running.errors import ModelRaised
from ...running.model.calling import IN_ARRAYS
from ...running.operations import below_autograd, operations_through
from ...running.places import code_of
from ...running.ranks import local, local_gradient
from ...running.rounding import nudge
from ...running.subject import Subject
from ...running.tolerances import NORMALISED_NATS
from ...running.variant import Variant, own, precise, scarce
from ...running.ways import TRAIN_WITHOUT_GRADIENTS
from ...tracing.recorder import Recorder
from ...tracing.value import FEWEST_DIFFERENT_NUMBERS, number_layers, plain
from .dropping import AtTheMean

NUMBERS_AT_ONCE = 2**22
Reduce = Callable[[Tensor], Tensor]
HASH = -7046029254386353131  # an odd factor with random bits, for hashes
MARKS = 64  # most marks of a weight (numbers by which it is recognised)
SHARED = 8  # marks that a weight and its counterpart must have in common


class Side:
    """One of two models that are compared, and the record of its run.

    `Side.run` makes a side and records its first run. Each run uses a new copy
    of the model and frees it afterwards. If there are too many values to keep,
    `visit` runs the model again. To record another fact of each run, add it to
    `record`. If only one caller needs the fact, add it to that caller's
    visitor.

    Args:
        subject: the model.
        tokens: ids to run.
        dtype: dtype to run in; None means float64 if the model runs in it.
        reduce: function to apply to each value before it is kept, or None.
        training: whether to run in train mode, with dropout at its mean.
    """

    # most entries of the first run to keep (256 MiB in float64); for a large
    # model, a quarter as many as it has weights
    most: float = 2**25
    kept: dict[int, Tensor] | None = None  # the kept values, by value number
    scored = True  # whether scores are among the values
    top: Tensor | None = None  # likeliest ids, if only these have scores
    written = IN_ARRAYS  # in words, why only scores are known
    single = False  # whether float64 was wanted but is not possible
    reduce: Reduce | None = None
    # the marks of each weight, with the weight's unit of rounding; only for a
    # run in float64, because a coarser run rounds more than weights do
    weights: Mapping[frozenset[int], float] = {}

    def __init__(
        self,
        subject: Subject,
        tokens: Int[Tensor, "batch time"],
        dtype: torch.dtype | None = None,
        reduce: Reduce | None = None,
        training: bool = False,
    ):
        self.subject, self.reduce, self.training = subject, reduce, training
        self.run_in = dtype
        self.tokens = tokens
        self.doubled = dtype is None  # whether in float64; a first run decides
        self.by_heads = False  # whether heads are also recorded as values
        self.below: Callable[[], AbstractContextManager] = below_autograd

    @classmethod
    def run(
        cls,
        subject: Subject,
        tokens: Int[Tensor, "batch time"],
        dtype: torch.dtype | None = None,
        reduce: Reduce | None = None,
        training: bool = False,
    ) -> "Side":
        """Return a side with the record of a run.

        After the run, `doubled` says whether it was in float64.

        Raises:
            ValueError: if the model raises, or if its scores do not come from
                operations that can be recorded.
        """
        side = cls(subject, tokens, dtype, reduce, training)
        if not side._ran_in_float64():
            side._run_as_it_can()
        return side

    def _ran_in_float64(self) -> bool:
        """Try a first run in float64; return whether the scores are finite."""
        builder = self.subject.builder
        known = builder.in_double
        if not self.doubled or not builder.can_copy or known:
            return False
        if scarce(self.subject):
            return False
        known[False] = self.subject.is_module  # assume so; undone on failure
        with suppress(ValueError):
            self.record()
            exact = self.dtype == torch.float64
            if exact and bool(self.scores.isfinite().all()):
                return True
        known.clear()
        return False

    def _run_as_it_can(self) -> None:
        try:
            self.record()
        except ValueError:  # the model may need autograd in its forward
            self.below = nullcontext
            self.record()
        self.doubled &= self.dtype == torch.float64
        self.single = self.run_in is None and not self.doubled

    @property
    def only_scores(self) -> bool:
        """Return whether only scores are known, as for functions of arrays."""
        ends = {self.last, self.normalised}
        return all(value.number in ends for value in self.values)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the scores in the first run."""
        return self.values[self.last].dtype

    def record(self) -> None:
        """Run the model once and keep a digest of each value."""
        model, recorder, scores = self._run()
        if missing := int(scores.isnan().sum()):
            raise ValueError(
                f"{self.subject.name}: {missing:,} of {scores.numel():,} "
                f"scores are NaN, which cannot be compared"
            )
        last = recorder.numbers.get(scores)
        if last is None or not any(v.place.in_model for v in recorder.values):
            raise ValueError(
                f"no floating values of {self.subject.name} could be "
                f"recorded: its scores do not come from torch's functions"
            )
        # value numbers of the scores and of their log-softmax; the same number
        # if the scores are log-probabilities
        self.last = self.normalised = last
        says_log_probs = scores.double().logsumexp(-1).abs() < NORMALISED_NATS
        if not says_log_probs.all():
            place = recorder.values[last].place
            place = replace(place, op="log_softmax", inside="taken here")
            log_probs = scores.log_softmax(-1)
            self.normalised = recorder.note(log_probs, place, [last])
        is_module = isinstance(model, nn.Module)
        self.values = number_layers(recorder.values)
        self.kept, self.scores = recorder.kept, plain(scores)
        self.lines, self.sent = recorder.lines, recorder.sent
        self.dtypes = recorder.dtypes
        self.coarse = self._coarse()
        self.detached = recorder.detached
        self.scripted = [
            name or type(part).__name__
            for name, part in (model.named_modules() if is_module else ())
            if isinstance(part, torch.jit.ScriptModule)
        ]
        self.nudgeable = is_module and self.subject.builder.can_copy
        fine = {*self.dtypes, self.dtype} == {torch.float64}
        if is_module and fine and not self.weights:
            self.weights = dict(_weights(model))

    def _coarse(self) -> set[int]:
        """Return the numbers of values that a coarser dtype has rounded."""
        eps = torch.finfo(self.values[self.last].dtype).eps
        found = set[int]()
        for value in self.values:
            rounds = torch.finfo(value.dtype).eps > eps
            if found.intersection(value.inputs) or (
                rounds and not value.digest.trivial
            ):
                found.add(value.number)
        return found

    def visit(
        self,
        numbers: Iterable[int],
        visitor: Callable[[int, Tensor], None],
        size: float = 0.0,
    ) -> None:
        """Call a visitor with each value, in the order of the run.

        The model runs again if its values were not kept. It also runs again if
        `size` is given: all weights then change at random by up to this share.
        """
        if self.kept is not None and not size:
            for number in sorted(numbers):
                visitor(number, self.kept[self.values[number].event])
            return
        wanted = {self.values[number].event: number for number in numbers}

        def call(event: int, value: Tensor) -> None:
            if event in wanted:
                visitor(wanted[event], value)

        _, recorder, scores = self._run(call, size)
        if recorder.events in wanted:  # log-softmax, which no line computes
            recorder.note(scores.log_softmax(-1), recorder.place, [])

    def keep(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """Return the values with these numbers, in float64 on the CPU."""
        kept: dict[int, Tensor] = {}

        def keep(number: int, value: Tensor) -> None:
            found = plain(value)
            kept[number] = found.clone() if self.kept is None else found

        self.visit(numbers, keep)
        return kept

    def module(self) -> nn.Module | None:
        """Return the model with its own weights, None for a function."""
        model = own(self.subject).model
        return model if isinstance(model, nn.Module) else None

    def gradients(self) -> dict[str, Tensor]:
        """Return each parameter's gradient, in the order of the backward pass.

        The loss is the mean cross-entropy of the next tokens. A text of one
        token has no loss, so there are no gradients. If the loss does not
        reach a parameter, its gradient is 0. Frozen parameters come first.
        """
        variant = self.variant()
        model, subject = variant.model, self.subject
        if not isinstance(model, nn.Module) or self.tokens.size(1) < 2:
            return {}
        order: list[str] = []  # a name each time that a gradient accumulates
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            parameter.grad = None
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: order.append(name)
                )
        with isolated(subject.seed):
            scores = variant.scores(self.tokens, grad=True, seed=subject.seed)
            if not scores.requires_grad:
                return {}
            log_probs = scores[:, :-1].log_softmax(-1)
            picked = log_probs.gather(-1, self.tokens[:, 1:, None])
            (-picked.mean()).backward()
        last_first = dict.fromkeys([*parameters, *order][::-1])
        found = {}
        for name in reversed(last_first):
            weight, gradient = parameters[name], parameters[name].grad
            found[name] = (
                torch.zeros_like(local(weight.detach()), device="cpu")
                if gradient is None
                else local_gradient(gradient, weight).cpu().clone()
            )
        return found

    def variant(self) -> Variant:
        """Return a new copy of the model, in the run's dtype and mode."""
        copy = precise if self.doubled else own
        variant = copy(self.subject)
        if self.run_in is not None and isinstance(variant.model, nn.Module):
            variant.model.to(self.run_in)
        if self.training:
            variant = variant.run_as(TRAIN_WITHOUT_GRADIENTS)
        return variant

    def _mode(self) -> AbstractContextManager:
        """Return a context that replaces dropout by its mean in train mode."""
        if self.training:
            return operations_through(AtTheMean())
        return nullcontext()

    @one_run
    def _run(
        self,
        visitor: Callable[[int, Tensor], None] | None = None,
        size: float = 0.0,
    ) -> tuple[Any, Recorder, Tensor]:
        """Run a new copy of the model; return it, its recorder and scores."""
        variant, subject = self.variant(), self.subject
        model = variant.model
        if size:
            weights = [*model.parameters(), *model.buffers()]
            rounded = [w for w in weights if w.is_floating_point() and w.dim()]
            nudge(rounded, size, subject.seed)
        count = sum(p.numel() for p in variant.parameters)
        recorder = Recorder(
            model,
            self.tokens,
            code_of(type(self)._run),
            self.by_heads,
            self.reduce,
            visitor,
            room=max(self.most, count / 4),
        )
        try:
            with (
                isolated(subject.seed),
                self.below(),
                self._mode(),
                operations_through(recorder),
            ):
                scores = variant.scores(self.tokens, seed=subject.seed)
        except ModelRaised as error:
            raise ValueError(f"{subject.name}: {error}") from error.__cause__
        return model, recorder, scores


def run_in_one_dtype(sides: tuple[Side, Side]) -> None:
    """Record a float64 side again if the other cannot run in float64."""
    if sides[0].dtype != sides[1].dtype:
        for side in sides:
            if side.doubled:
                side.doubled = False
                side.record()


def unit_of(left: Side, right: Side) -> float:
    """Return the unit of rounding in which two sides may differ.

    This is usually the unit of the values' dtypes. If each side has weights
    that the other lacks, it is the unit of these weights. One side may have
    converted them, and rounded them again.
    """
    kinds = [
        max(torch.finfo(dtype).eps for dtype in {*side.dtypes, side.dtype})
        for side in (left, right)
    ]
    units = []
    for ours, theirs in ((left, right), (right, left)):
        known = set[int]().union(*theirs.weights)
        own = [
            unit
            for marks, unit in ours.weights.items()
            if len(marks & known) < min(len(marks), SHARED)
        ]
        units.append(max(own, default=0.0))
    # a side that rounds more coarsely than float32 inside counts as float32
    single = torch.finfo(torch.float32).eps
    return max(min(units), min(kinds), min(max(kinds), single))


def _weights(model: nn.Module) -> Iterator[tuple[frozenset[int], float]]:
    """Yield the marks of each weight, with the weight's unit of rounding.

    Marks are the lowest hashes of the entries. So a tensor has the same marks
    in any layout, and each part of it has some of them. If float32 holds all
    entries of a weight exactly, its unit is that of float32.
    """
    for tensor in map(local, model.parameters()):
        if not (tensor.is_floating_point() and tensor.numel()):
            continue
        marks, once = torch.tensor([], dtype=torch.int64), True
        for part in tensor.detach().flatten().split(NUMBERS_AT_ONCE):
            once &= part.equal(part.float().to(part.dtype))
            hashed = part.cpu().double().view(torch.int64) * HASH
            # sort only low hashes, about eight times as many as are kept
            bound = 8 * MARKS * (2**64 // len(hashed)) - 2**63
            lowest = hashed[hashed < min(bound, 2**63 - 1)]
            marks = torch.cat([marks, lowest]).unique()[:MARKS]
        if len(marks) >= FEWEST_DIFFERENT_NUMBERS:
            kind = torch.float32 if once else torch.float64
            yield frozenset(marks.tolist()), torch.finfo(kind).eps
