"""The gradient that a backward pass returns is the function's own."""

from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ....running.context import during
from ....running.errors import FailureAt, ModelRaised, SkipCheck
from ....running.losses import scores_and_loss
from ....running.operations import (
    functions_through,
    is_plain,
    operations_through,
)
from ....running.places import Place, find_place
from ....running.ranks import (
    current,
    largest,
    largest_of,
    local_gradient,
)
from ....running.rounding import Inside, require_finite
from ....running.tolerances import FLOOR_UNITS
from ....running.variant import Variant, changeable, doubled, redraw_zeros
from ....running.ways import EVAL, INFERENCE, TRAIN, WITH_GRADIENTS
from ...check import Subject, check
from ...derivatives import gradients_of, own_functions, place_of_backward
from .differences import (
    COARSE,
    PIECEWISE,
    ROUGH,
    WIDE,
    Along,
    Pair,
    free_parameters,
)


@check(implied_by=("check_purity",), needs="gradients")
def check_gradients(subject: Subject) -> str:
    """The gradient belongs to the function that the forward computes.

    Why: with a backward of one's own, a detached factor, or a block that is
    recomputed with another dropout mask, training goes somewhere else.
    How: the derivative of a random combination of scores along a random
    direction must be that of central differences, in eval and train mode; if
    not, each parameter is tried alone. Twice the model's own loss must have
    twice the gradient. In float32, where these are rough, a
    direction is what a detach takes away. A call in inference mode comes
    first: a table that it leaves cannot be trained with. Padding rows and
    parameters with gradient hooks are left out.
    Reports: allenai/OLMo-core 828, a checkpoint with another dropout mask.
    """
    subject.require_gradients()
    subject.require_no_state()
    variant = changeable(subject, "a function has no weights")
    model = doubled(subject, variant.model)
    generator = subject.generator()
    redraw_zeros(model, generator)
    tokens = subject.draw(3, 8, generator)
    tokens[:, -1] = tokens[:, 0]  # an id that comes twice
    note, ranks = "", current()
    # fully_shard keeps what it gathers in that mode
    if ranks is None and all(is_plain(type(p)) for p in variant.parameters):
        with suppress(ModelRaised):  # as who looks before training may do
            variant.run_as(INFERENCE).scores(tokens)
    for case in (EVAL, TRAIN):
        note = _compare(variant.run_as(case), tokens, generator) or note
    if ranks and ranks.partial:
        note += f"; a part of a sum on each rank: {min(ranks.partial)}"
        note += f" and {len(ranks.partial) - 1} more"
    if subject.caller.target_name is not None:
        for case in (TRAIN, WITH_GRADIENTS)[: 1 if subject.heavy else 2]:
            _require_scaled(variant.run_as(case), tokens)
    return f"eval and train mode, along random directions{note}"


def _compare(
    variant: Variant,
    tokens: Int[Tensor, "rows time"],
    generator: torch.Generator,
) -> str:
    """Return a note for the report, or raise for a wrong gradient."""
    free = free_parameters(variant.model)
    with operations_through(Inside()) as inside:
        scores = variant.scores(tokens, grad=True)
    if not free or not scores.requires_grad:
        raise SkipCheck("the scores have no gradient")
    if inside.unit > COARSE:
        raise SkipCheck("too coarse inside for differences")
    weights = torch.randn(scores.shape, generator=generator).to(scores)
    backwards = Inside()  # ranks may sum gradients in another dtype

    def gradients(scores: Tensor) -> dict[str, Tensor]:
        with during("in the backward pass"), operations_through(backwards):
            found = gradients_of(
                (scores * weights).sum(),
                [p for p, _ in free.values()],
                allow_unused=True,
                materialize_grads=True,
            )
        return {
            name: local_gradient(g, p)
            for (name, (p, _)), g in zip(free.items(), found, strict=True)
        }

    along = Along(
        free,
        gradients(scores),
        lambda: float((variant.scores(tokens) * weights).sum()),
        inside.unit ** (1 / 3),
        FLOOR_UNITS * inside.unit * float((scores.detach() * weights).norm()),
        generator,
        _coarser(backwards, inside),
    )
    names = [*largest_of(dict.fromkeys(free, 0.0))]  # stages have their own
    wrong: dict[str, Pair] = {}
    # the rounding of all would hide a fault of one
    each = along.coarse > 0 and not variant.subject.heavy
    if each or not along.smoothest(names).agree:
        pairs = {name: along.smoothest([name]) for name in names}
        wrong = {n: pair for n, pair in pairs.items() if not pair.agree}
    elif along.step > WIDE and current() is None:
        with suppress(AssertionError), functions_through(Attached()):
            whole = gradients(variant.scores(tokens, grad=True))
            wrong = _taken_away(along, whole)
    if inside.operations & PIECEWISE or any(
        pair.difference == 0 for pair in wrong.values()
    ):
        return (
            "; gradients through piecewise-constant operations are estimates "
            "and were not judged"
        )
    if not wrong:
        return ""
    if variant.case.training:
        variant.start_again()
        one, two = (variant.scores(tokens, seed=1, go_on=True) for _ in "ab")
        if not one.equal(two):  # spectral norm estimates again each time
            return "; in train mode each call changes the next one's scores"
    require_finite(scores)
    name, pair = max(wrong.items(), key=lambda item: item[1].share)
    where, stop = "", None
    with suppress(AssertionError), functions_through(Attached()) as attached:
        along.gradients = gradients(variant.scores(tokens, grad=True))
        if along.smoothest([*wrong]).agree and attached.places:
            stop = next(iter(attached.places))
            where = f" at {stop}"
    if where and all(p.is_library for p in attached.places):
        return f"; a library stops the gradient of {name}{where}"
    stops = f"stops{where}" if where else "is not the function's"
    raise FailureAt(
        f"the gradient of {name} {stops}: along a direction the "
        f"backward pass says {pair.backward:.6g}, differences "
        f"of the scores say {pair.difference:.6g} (+- {pair.uncertain:.1g})"
        f"{variant.conditions}",
        stop,
    )


def _require_scaled(
    variant: Variant, tokens: Int[Tensor, "rows time"]
) -> None:
    """Require that twice the loss has twice the gradient."""
    parameters = [p for p, _ in free_parameters(variant.model).values()]
    found: list[list[Tensor]] = []
    functions: list[type] = []
    losses: list[float] = []
    for factor in (1.0, 2.0):
        # check_loss and check_gradient_flow report these
        with suppress(AssertionError, ModelRaised):
            variant.start_again()
            _, loss = scores_and_loss(variant, tokens, tokens)
            if loss is None or not loss.requires_grad:
                return
            functions = own_functions(loss)
            losses.append(float(loss.detach()))
            with during("in the backward pass of the loss"):
                found.append(
                    gradients_of(
                        factor * loss, parameters, materialize_grads=True
                    )
                )
    # a loss that is another one each time has another gradient
    if len(found) < 2 or losses[0] != losses[1] or current() is not None:
        return
    more = [two - 2 * one for one, two in zip(*found, strict=True)]
    size, apart = (
        sum(float(g.to_dense().double().square().sum()) for g in grads) ** 0.5
        for grads in (found[0], more)
    )
    if not apart > ROUGH * size:
        return
    place = place_of_backward(functions)
    where = f" ({place})" if place else ""
    raise FailureAt(
        f"the gradient of twice the loss is not twice that of the loss, "
        f"{variant.case.mode}: it is {apart / size:.2g} of it apart; a "
        f"backward pass{where} ignores the gradient that comes in, so that "
        f"loss scaling and accumulation change nothing",
        place,
    )


def _coarser(backwards: Inside, inside: Inside) -> float:
    """Return the unit of rounding of a backward pass, if it has a larger."""
    own = backwards.unit if backwards.dtypes else 0.0
    unit = float(largest(torch.tensor([own], dtype=torch.float64)))
    return unit if unit > inside.unit else 0.0


def _taken_away(along: Along, whole: dict[str, Tensor]) -> dict[str, Pair]:
    """Return the gradient of which a detach takes most, if differences tell.

    Steps as wide as float32 needs leave a tenth of a gradient uncertain. What
    is taken away is known: whole is what the backward pass says without any
    detach. In its direction the differences are nearer to one of the two.
    """
    taken = {n: whole[n] - g for n, g in along.gradients.items()}
    name = max(taken, key=lambda n: float(taken[n].norm()))
    if not taken[name].any():
        return {}
    along.towards = {name: taken[name]}
    without = along.smoothest([name])
    along.gradients = whole
    nearer = 2 * along.smoothest([name]).apart < without.apart
    return {name: without} if nearer else {}


class Attached:
    """Takes no tensor out of the graph, and records the lines that would."""

    STOPS = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function, unless it takes a tensor out."""
        if func in self.STOPS and args[0].grad_fn is not None:
            self.places[find_place("detach")] = None
            return args[0].view_as(args[0])
        return func(*args, **kwargs)
