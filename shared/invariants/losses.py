"""Losses: the mean cross-entropy, and all that a loss might be instead."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .errors import during
from .model.reading import find_loss
from .randomness import seed_all
from .variant import DROPOUT_SEED, Variant


def cross_entropy(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    **how: Any,
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy, of targets on any device."""
    targets = targets.flatten().to(scores.device)
    return F.cross_entropy(scores.flatten(0, 1), targets, **how)


def mean_loss(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    shift: int,
    mark: int | None = None,
    total: bool = False,
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of shifted targets, or its sum."""
    if shift:
        scores, targets = scores[:, :-shift], targets[:, shift:]
    return cross_entropy(
        scores.double(),
        targets,
        ignore_index=-100 if mark is None else mark,
        reduction="sum" if total else "mean",
    )


def added_to(
    scores: Tensor, targets: tuple[Tensor, Tensor], losses: tuple
) -> Tensor:
    """Return what is added to the mean whatever the targets, or 0."""
    for shift in (0, 1):
        one, two = (
            loss.double() - mean_loss(scores, ids, shift)
            for ids, loss in zip(targets, losses, strict=True)
        )
        if (one - two).abs() <= 1e-6 * losses[0].abs():
            return one
    return torch.zeros(())


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two losses are the same to the rounding of the second."""
    return bool((a - b).abs() <= tolerance_of(b) * (1 + a.abs()))


def tolerance_of(value: Tensor) -> float:
    """Return what losses of a dtype may differ by, relative to them."""
    return 1e-5 if value.dtype in (torch.float32, torch.float64) else 1e-2


def shifts_of(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    loss: Float[Tensor, ""],
    mark: int | None = None,
) -> set[int]:
    """Return the shifts of targets at which the loss is their mean."""
    return {
        shift
        for shift in (0, 1)
        if close(mean_loss(scores, targets, shift, mark), loss)
    }


def wrong_loss(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    loss: Float[Tensor, ""],
    mark: int | None = None,
) -> AssertionError:
    """Return the failure of a loss that is no mean: what it is nearest to."""
    loss, scores = loss.detach().double(), scores.detach()
    means = [float(mean_loss(scores, targets, s, mark)) for s in (0, 1)]
    wrong = _wrong_losses(scores, targets, mark)
    name = min(wrong, key=lambda name: float((wrong[name] - loss).abs()))
    where = "" if mark is None else f", some of them {mark}"
    nearest = f"nearest is that {name}, {float(wrong[name]):.6g}"
    if not close(wrong[name], loss):
        nearest += (
            ", and not it: where the model adds a term of its own, expect "
            "this failure"
        )
    batch, time = targets.shape
    return AssertionError(
        f"the loss of {batch} x {time} targets{where} is {float(loss):.6g}, "
        f"but the mean cross-entropy of the model's own scores is "
        f"{means[0]:.6g}, or {means[1]:.6g} shifted by one; {nearest}"
    )


def _wrong_losses(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    mark: int | None,
) -> dict[str, Tensor]:
    """Return losses that models are known to return, by a description."""
    batch, time = targets.shape
    losses = {"shifted twice": mean_loss(scores, targets, 2, mark)}
    for shift, where in ((0, ""), (1, ", shifted by one")):
        total = mean_loss(scores, targets, shift, mark, total=True)
        steps = time - shift
        losses |= {
            f"summed{where}": total,
            f"summed over time, averaged over the batch{where}": total / batch,
            f"summed over the batch, averaged over time{where}": total / steps,
            f"averaged over padding, too{where}": total / (batch * steps),
        }
    return losses


def scores_and_loss(
    variant: Variant, tokens: Tensor, targets: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return scores and loss of the model's own call with targets.

    None for what it does not return.

    Raises:
        ModelRaised: for a call with targets that the model refuses.
        AssertionError: for changed targets, and a loss that is no number.
    """
    subject, model, case = variant.subject, variant.model, variant.case
    if isinstance(model, nn.Module):
        model.train(case.training)
    name = subject.caller.target_name or ""
    given = [x.to(subject.device, copy=True) for x in (tokens, targets)]
    variant.start_again()
    if case.training or subject.noisy:
        seed_all(DROPOUT_SEED if case.training else subject.seed)
    with during(f"when given {name}"), torch.set_grad_enabled(case.grad):
        answer = subject.caller.call_own(model, given[0], **{name: given[1]})
    if not given[1].equal(targets.to(subject.device)):
        raise AssertionError(f"a forward changes its {name}")
    loss = find_loss(answer)
    if loss is not None and not torch.isfinite(loss):
        raise AssertionError(
            f"the loss is {loss.item()}, with {name} from "
            f"{int(targets.min())} to {int(targets.max())}"
        )
    return subject.find(answer, *tokens.shape), loss
