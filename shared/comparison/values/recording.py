"""Run a model and keep what every line of it computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...invariants.errors import ModelRaised
from ...invariants.model.randomness import isolated
from ...invariants.model.subject import Subject
from .places import Locator, layers_by_repetition
from .recorder import Recorder
from .value import Value


@dataclass(frozen=True)
class Recording:
    """What one run of a model computed.

    Attributes:
        values: in the order of the run.
        last: number of the value that are the model's scores.
        normalised: number of their log-softmax; `last` where the scores are
            log-probabilities.
        scripted: names of parts whose lines cannot be seen.
    """

    values: Sequence[Value]
    last: int
    normalised: int
    scripted: Sequence[str]


def record(
    subject: Subject,
    model: Any,
    tokens: Int[Tensor, "batch time"],
    by_heads: bool = False,
) -> Recording:
    """Run a model once and keep a digest of each value.

    Args:
        subject: how the model is called.
        model: as the subject built it.
        tokens: ids.
        by_heads: whether values of many heads are kept head by head, too.

    Raises:
        ValueError: where the model's own exception ends the run, or where
            its scores come out of nothing that could be recorded.
    """
    recorder = Recorder(Locator(model, _run.__code__), by_heads)
    scores = _run(recorder, subject, model, tokens)
    last = recorder.numbers.get(scores)
    if last is None or not any(v.place.in_model for v in recorder.values):
        raise ValueError(
            f"no floating values of {subject.name} could be recorded: its "
            f"scores do not come from torch's functions"
        )
    normalised = last
    if not says_log_probs(scores):
        with recorder.resting():
            place = recorder.values[last].place
            place = replace(place, op="log_softmax", inside="taken here")
            normalised = recorder.note(scores.log_softmax(-1), place, [last])
    places = layers_by_repetition(
        [value.place for value in recorder.values], recorder.stacks
    )
    values = [
        replace(value, place=place)
        for value, place in zip(recorder.values, places, strict=True)
    ]
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    scripted = [
        name or type(part).__name__
        for name, part in modules
        if isinstance(part, torch.jit.ScriptModule)
    ]
    return Recording(values, last, normalised, scripted)


def visit(
    subject: Subject,
    model: Any,
    tokens: Int[Tensor, "batch time"],
    visitors: Mapping[int, Callable[[Tensor], None]],
    by_heads: bool = False,
) -> None:
    """Run a model again and hand out some of its values as they come.

    The visitors are called with the values of their events; the rest is as in
    the first run.
    """
    locator = Locator(model, _run.__code__)
    recorder = Recorder(locator, by_heads, visitors)
    scores = _run(recorder, subject, model, tokens)
    if recorder.events in visitors:  # the log-softmax that was taken here
        visitors[recorder.events](scores.log_softmax(-1))


def says_log_probs(scores: Float[Tensor, "batch time vocab"]) -> bool:
    """Whether scores are log-probabilities: their exponentials sum to 1."""
    return bool((scores.double().logsumexp(-1).abs() < 1e-4).all())


def _run(
    recorder: "Recorder",
    subject: Subject,
    model: Any,
    tokens: Int[Tensor, "batch time"],
) -> Tensor:
    try:
        with (
            isolated(subject.seed),
            torch.compiler.set_stance("force_eager"),
            recorder.below,
            recorder,
        ):
            return subject.scores(model, tokens, seed=subject.seed)
    except ModelRaised as error:
        raise ValueError(f"{subject.name}: {error}") from error.__cause__
