"""One of the two models: recorded once, run again for some of its values."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...invariants.errors import ModelRaised
from ...invariants.model.randomness import isolated
from ...invariants.model.subject import Subject
from .recorder import Recorder, below_autograd
from .value import FEWEST, layers_by_repetition, plain

ROWS_AT_ONCE = 4096  # of a matrix that is nudged
NUMBERS_AT_ONCE = 2**22
HASH = -7046029254386353131  # odd, its bits mixed
MARKS = 64  # numbers that a weight is known by
SHARED = 8  # of them must be the other's


class Side:
    """One of two models: copied for each run, the copy freed after it.

    Args:
        subject: the model.
        tokens: ids to run.

    Attributes:
        doubled: whether it runs in float64.
        values: what the first run computed, in its order.
        last: number of the value that are the model's scores.
        normalised: number of their log-softmax; `last` where the scores are
            log-probabilities.
        scripted: names of parts whose lines cannot be seen.

    Raises:
        ValueError: where the model's own exception ends a run, or where its
            scores come out of nothing that could be recorded.
    """

    def __init__(self, subject: Subject, tokens: Int[Tensor, "batch time"]):
        self.subject = subject
        self.tokens = tokens
        self.doubled, self.by_heads = True, False
        self._record()
        self.doubled = self.dtype == torch.float64

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores in the first run."""
        return self.values[self.last].dtype

    def single(self) -> None:
        """Run in the model's own precision from now on."""
        self.doubled = False
        self._record()

    def split_heads(self) -> None:
        """Keep values of many heads head by head, too."""
        self.by_heads = True
        self._record()

    def visit(
        self,
        visitors: Mapping[int, Callable[[Tensor], None]],
        nudge: float = 0.0,
    ) -> None:
        """Run again, and hand out values by their number as they come.

        A nudge is the relative size of a random change to all weights.
        """
        events = {self.values[n].event: call for n, call in visitors.items()}
        model = self._build()
        if nudge:
            nudge_weights(model, nudge)
        recorder = self._recorder(model, events)
        scores = self._run(recorder, model)
        if recorder.events in events:  # the log-softmax that was taken here
            events[recorder.events](scores.log_softmax(-1))

    def _record(self) -> None:
        """Run once and keep a digest of each value."""
        model = self._build()
        recorder = self._recorder(model)
        scores = self._run(recorder, model)
        values = recorder.values
        last = recorder.numbers.get(scores)
        if last is None or not any(v.place.in_model for v in values):
            raise ValueError(
                f"no floating values of {self.subject.name} could be "
                f"recorded: its scores do not come from torch's functions"
            )
        self.last = self.normalised = last
        says_log_probs = scores.double().logsumexp(-1).abs() < 1e-4
        if not says_log_probs.all():
            place = replace(
                values[last].place, op="log_softmax", inside="taken here"
            )
            self.normalised = recorder.note(
                scores.log_softmax(-1), place, [last]
            )
        self.values = layers_by_repetition(values)
        is_module = isinstance(model, nn.Module)
        self.scripted = [
            name or type(part).__name__
            for name, part in (model.named_modules() if is_module else ())
            if isinstance(part, torch.jit.ScriptModule)
        ]
        self.nudgeable = is_module and self.subject.builder.can_copy
        self.weights = [*_weights(model)]

    def _build(self) -> Any:
        subject = self.subject
        return subject.precise() if self.doubled else subject.build()

    def _recorder(
        self, model: Any, visitors: Mapping[int, Any] | None = None
    ) -> Recorder:
        return Recorder(model, Side._run, self.by_heads, visitors)

    def _run(self, recorder: Recorder, model: Any) -> Tensor:
        seed = self.subject.seed
        try:
            with (
                isolated(seed),
                torch.compiler.set_stance("force_eager"),
                below_autograd(),
                recorder,
            ):
                return self.subject.scores(model, self.tokens, seed=seed)
        except ModelRaised as error:
            name = self.subject.name
            raise ValueError(f"{name}: {error}") from error.__cause__


def keep(side: Side, numbers: Iterable[int]) -> dict[int, Tensor]:
    """Run a side again and return some of its values."""
    kept: dict[int, Tensor] = {}

    def keeper(number: int) -> Callable[[Tensor], None]:
        def call(value: Tensor) -> None:
            kept[number] = plain(value).clone()

        return call

    side.visit({number: keeper(number) for number in numbers})
    return kept


def nudge_weights(model: Any, size: float) -> None:
    """Change every weight by a random share of a relative size."""
    if not isinstance(model, nn.Module):
        return
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_floating_point() or tensor.dim() == 0:
                continue
            for part in tensor.split(ROWS_AT_ONCE):
                noise = torch.rand(part.shape, generator=generator)
                noise = noise.to(part).mul_(2).sub_(1)
                part.addcmul_(part, noise, value=size)


def unit_of(left: Side, right: Side) -> float:
    """Return the unit of rounding in which two sides may differ.

    That of their values; and where both have weights that the other has
    not, that of these: one may be made of the other, and rounded again.
    """
    values = [*left.values, *right.values]
    units = [0.0, 0.0]
    for i, (ours, theirs) in enumerate(((left, right), (right, left))):
        known = set[int]().union(*(marks for marks, _ in theirs.weights))
        for marks, unit in ours.weights:
            if len(marks & known) < min(len(marks), SHARED):
                units[i] = max(units[i], unit)
    return max(min(units), *(torch.finfo(v.dtype).eps for v in values))


def _weights(model: Any) -> Iterator[tuple[set[int], float]]:
    """Yield of each weight marks to know it by, and its unit of rounding.

    The marks are the numbers with the lowest hashes: a part of a tensor has
    some of them, in any layout. What was float32 once keeps its unit.
    """
    for tensor in model.parameters() if isinstance(model, nn.Module) else ():
        if not tensor.is_floating_point():
            continue
        marks, once = torch.tensor([], dtype=torch.int64), True
        for part in tensor.detach().flatten().split(NUMBERS_AT_ONCE):
            once &= part.equal(part.float().to(part.dtype))
            hashed = part.cpu().double().view(torch.int64) * HASH
            lowest = hashed.topk(min(MARKS, len(hashed)), largest=False)
            marks = torch.cat([marks, lowest.values]).unique()[:MARKS]
        if len(marks) >= FEWEST:
            kind = torch.float32 if once else torch.float64
            yield set(marks.tolist()), torch.finfo(kind).eps
