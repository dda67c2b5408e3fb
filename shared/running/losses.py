"""Compute losses: the mean cross-entropy, and common wrong losses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .model.calling import find_loss
from .tolerances import (
    LOSS_SHARE_OF_16_BITS,
    LOSS_SHARES,
    SMOOTHED_SHARE,
    TERM_SHARE,
    TERM_SHARE_OF_THREE,
)
from .variant import Variant

MOST_SMOOTHED = 0.5  # largest share of smoothing next to an added term


def cross_entropy(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    **how: Any,
) -> Float[Tensor, "*shape"]:
    """Return the cross-entropy; the targets may be on any device.

    It is the mean over positions, unless `how` has another reduction.
    """
    targets = targets.flatten().to(scores.device)
    return F.cross_entropy(scores.flatten(0, 1), targets, **how)


def mean_loss(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    shift: int,
    mark: int | None = None,
    reduction: str = "mean",
    smoothed: float = 0.0,
) -> Float[Tensor, "*shape"]:
    """Return the cross-entropy of targets shifted by `shift`, in float64."""
    if shift:
        scores, targets = scores[:, :-shift], targets[:, shift:]
    return cross_entropy(
        scores.double(),
        targets,
        ignore_index=-100 if mark is None else mark,
        reduction=reduction,
        label_smoothing=smoothed,
    )


def added_to(
    scores: Tensor, targets: Sequence[Tensor], losses: Sequence[Any]
) -> tuple[set[int], float, float]:
    """Explain losses as the mean cross-entropy plus a term, or smoothed.

    `losses` has the loss for each of `targets`. Two losses suffice to find a
    term or a share of label smoothing; to find both, a third loss is needed.

    Returns:
        The shifts of the targets that explain the losses, a term that does not
        depend on targets, and the share by which the targets are smoothed.
    """
    values = [float(loss.detach().double()) for loss in losses]
    for shift in (0, 1):
        means = [float(mean_loss(scores, ids, shift)) for ids in targets]
        rest = [loss - m for m, loss in zip(means, values, strict=True)]
        if max(rest) - min(rest) <= TERM_SHARE * abs(values[0]):
            return {shift}, rest[0], 0.0
        # label smoothing mixes a share of the mean loss over all ids into each
        # loss
        kept = scores.double()[:, : scores.size(1) - shift]
        every = -float(kept.log_softmax(-1).mean())
        shares = [r / (every - m) for r, m in zip(rest, means, strict=True)]
        if 0 < shares[0] < 1 and _all_close(shares):
            return {shift}, 0.0, shares[0]
        if len(means) > 2 and means[0] != means[1]:
            share = 1 - (values[0] - values[1]) / (means[0] - means[1])
            terms = [
                v - m - share * (every - m)
                for v, m in zip(values, means, strict=True)
            ]
            near = TERM_SHARE_OF_THREE * abs(values[0])
            same = max(terms) - min(terms) <= near
            # a loss that is only scaled down would give a term below 0
            if same and 0 < share < MOST_SMOOTHED and terms[0] > 0:
                return {shift}, terms[0], share
    return set(), 0.0, 0.0


def _all_close(shares: Sequence[float]) -> bool:
    near = partial(math.isclose, shares[0], rel_tol=SMOOTHED_SHARE)
    return all(map(near, shares[1:]))


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two losses are equal up to the second loss's rounding."""
    return bool((a - b).abs() <= tolerance_of(b) * (1 + a.abs()))


def tolerance_of(value: Tensor) -> float:
    """Return the relative difference that rounding allows in a loss."""
    return LOSS_SHARES.get(value.dtype, LOSS_SHARE_OF_16_BITS)


def shifts_of(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    loss: Float[Tensor, ""],
    mark: int | None = None,
) -> set[int]:
    """Return which shifts of targets make the loss the mean cross-entropy."""
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
    """Return an error that says why a loss is not the mean cross-entropy."""
    loss, scores = loss.detach().double(), scores.detach()
    means = [float(mean_loss(scores, targets, s, mark)) for s in (0, 1)]
    wrong = _wrong_losses(scores, targets, mark)
    name = min(wrong, key=lambda name: float((wrong[name] - loss).abs()))
    where = "" if mark is None else f", some of them {mark}"
    cause = f"it is the loss {name}"
    if not close(wrong[name], loss):
        cause = (
            "no sum, second shift or mean over other targets gives it, nor a "
            "term added to the mean that targets do not change"
        )
    batch, time = targets.shape
    return AssertionError(
        f"the loss of {batch} x {time} targets{where} is {float(loss):.6g}, "
        f"but the mean cross-entropy of the model's own scores is "
        f"{means[0]:.6g}, or {means[1]:.6g} shifted by one; {cause}"
    )


def _wrong_losses(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    mark: int | None,
) -> dict[str, Tensor]:
    """Return the values of losses with common mistakes, by description."""
    none = -100 if mark is None else mark
    losses = {"shifted twice": mean_loss(scores, targets, 2, mark)}
    for shift, where in ((0, ""), (1, ", shifted by one")):
        each = mean_loss(scores, targets, shift, mark, "none")
        ids = targets[:, shift:].to(each.device)
        each, counted = each.view(ids.shape), ids != none
        total, (rows, steps) = each.sum(), ids.shape
        filled = targets.masked_fill(targets == none, 0)
        found = {
            "summed": total,
            "summed over time, averaged over the batch": total / rows,
            "summed over the batch, averaged over time": total / steps,
            "that leaves id 0 out": each[counted & (ids != 0)].mean(),
            "that leaves the last position out": (
                each[:, :-1][counted[:, :-1]].mean()
            ),
            "in bits": total / counted.sum() / math.log(2),
            "averaged over each row first": (
                (each.sum(1) / counted.sum(1)).mean()
            ),
            "averaged over padding as well": each.mean(),
            f"that counts {none} as id 0": mean_loss(scores, filled, shift),
        }
        found |= _of_chunks(each, counted)
        if not shift:
            turned = targets.mT.reshape(targets.shape)
            found["of targets transposed"] = mean_loss(scores, turned, 0, mark)
        losses |= {f"{name}{where}": loss for name, loss in found.items()}
    return losses


def _of_chunks(
    each: Float[Tensor, "batch time"], counted: Bool[Tensor, "batch time"]
) -> dict[str, Tensor]:
    """Return wrong losses that are computed chunk by chunk, by description.

    There are three kinds: the mean of each chunk counts equally, the means are
    summed, or an incomplete chunk is dropped.
    """
    mean, found = each.sum() / counted.sum(), dict[str, Tensor]()
    for count in range(2, each.numel()):
        found[f"{count} times as large, as a sum over {count} chunks"] = (
            count * mean
        )
    flat = each.view(1, -1), counted.view(1, -1)
    for (losses, shown), of in ((flat, ""), ((each, counted), " along time")):
        for size in range(2, losses.size(1)):
            parts = zip(
                losses.split(size, 1), shown.split(size, 1), strict=True
            )
            means = torch.stack([x.sum() / n.sum() for x, n in parts])
            whole = losses.size(1) // size * size
            kept = losses[:, :whole].sum() / shown[:, :whole].sum()
            chunks = f"chunks of {size}{of}"
            found |= {
                f"of {chunks}, whose last one is dropped": kept,
                f"of {chunks}, the mean of their means": means.mean(),
                f"of {chunks}, the sum of their means": means.sum(),
            }
    return found


def scores_and_loss(
    variant: Variant, tokens: Tensor, targets: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return scores and loss from one call of the model with targets.

    Each is None if the model does not return it.

    Raises:
        ModelRaised: if the model refuses a call with targets.
        AssertionError: if targets are changed, or the loss is not a number.
    """
    subject, name = variant.subject, variant.subject.caller.target_name
    given = targets.to(subject.device, copy=True)
    run = variant.run_as(replace(variant.case, own=True))
    answer = run.answer(tokens, targets=given)
    if not given.equal(targets.to(subject.device)):
        raise AssertionError(f"a forward changes its {name}")
    loss = find_loss(answer)
    if loss is not None and not torch.isfinite(loss):
        raise AssertionError(
            f"the loss is {loss.item()}, with {name} from "
            f"{int(targets.min())} to {int(targets.max())}"
        )
    return subject.reader.find(answer, *tokens.shape), loss
