"""A backward pass returns the gradient of the forward function."""

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


@check(implied_by=("check_purity",), needs="gradients", weight=4)
def check_gradients(subject: Subject) -> str:
    """The gradient belongs to the function that the forward computes.

    Why: with a wrong hand-written backward, a detached factor, or a block that
    is recomputed with another dropout mask, a model trains with wrong
    gradients.
    How: the derivative of a random combination of scores along a random
    direction must equal the derivative by central differences, in eval and
    train mode. If the two differ, parameters are tried one by one. Twice the
    model's own loss must have twice the gradient. Differences are imprecise in
    float32, so there one of the directions is the part of the gradient that a
    detach removes. First the model runs in inference mode, because a table
    that it keeps from this run would break training. Padding rows and
    parameters with gradient hooks are left out.
    If it fails: look for a detach, a hand-written backward, a hook, a
    checkpoint that does not preserve the random state, or a table made and
    kept under torch.inference_mode(). Gradients through piecewise-constant
    operations (straight-through estimators) are estimates. The check reports
    that it did not judge them.
    Reports: allenai/OLMo-core 828, a checkpoint with another dropout mask.
    """
    subject.require_gradients()
    subject.require_no_state()
    variant = changeable(subject, "a function has no weights")
    model = doubled(subject, variant.model)
    generator = subject.generator()
    redraw_zeros(model, generator)
    tokens = subject.draw(3, 8, generator)
    tokens[:, -1] = tokens[:, 0]  # one id occurs twice in each row
    note, ranks = "", current()
    # not for fully_shard: it would keep the tensors that it gathers in
    # inference mode
    if ranks is None and all(is_plain(type(p)) for p in variant.parameters):
        # first run inference, as users may do before training
        with suppress(ModelRaised):
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
    backwards = Inside()  # records the dtypes in which ranks sum gradients

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
    # names of all ranks: pipeline stages have different parameters
    names = [*largest_of(dict.fromkeys(free, 0.0))]
    wrong: dict[str, Pair] = {}
    # one parameter at a time if gradients are coarse: with all together,
    # rounding would hide a single fault
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
        if not one.equal(two):  # as with a spectral norm
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
        # check_loss and check_gradient_flow report exceptions
        with suppress(AssertionError, ModelRaised):
            variant.start_again()
            _, loss = scores_and_loss(variant, tokens, tokens)
            if loss is None or not loss.requires_grad:
                return
            functions = own_functions(loss)
            losses.append(float(loss.detach()))
            with during("in the backward pass of the loss"):
                grads = gradients_of(
                    factor * loss, parameters, materialize_grads=True
                )
            # float32 saves memory, and shows a fault of a tenth
            found.append([_in_short(g) for g in grads])
            del grads
    # a loss that changes between calls has no single gradient
    if len(found) < 2 or losses[0] != losses[1] or current() is not None:
        return
    # subtract one gradient at a time: a third set of gradients would need much
    # memory
    more = (two.sub(one, alpha=2) for one, two in zip(*found, strict=True))
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


def _in_short(gradient: Tensor) -> Tensor:
    """Return a float64 gradient in float32, any other gradient unchanged."""
    return gradient.float() if gradient.dtype == torch.float64 else gradient


def _coarser(backwards: Inside, inside: Inside) -> float:
    """Return the backward's unit of rounding if above the forward's, or 0."""
    own = backwards.unit if backwards.dtypes else 0.0
    unit = float(largest(torch.tensor([own], dtype=torch.float64)))
    return unit if unit > inside.unit else 0.0


def _taken_away(along: Along, whole: dict[str, Tensor]) -> dict[str, Pair]:
    """Return the gradient that a detach changes most, if it is wrong.

    In float32, finite differences leave a tenth of a gradient uncertain. But
    along the part that the detach removes, they show which gradient is right.
    `whole` has the gradients without any detach.
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
    """Keeps tensors in autograd's graph; records lines that would detach."""

    STOPS = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}

    def __call__(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function, unless it detaches a tensor."""
        if func in self.STOPS and args[0].grad_fn is not None:
            self.places[find_place("detach")] = None
            return args[0].view_as(args[0])
        return func(*args, **kwargs)
