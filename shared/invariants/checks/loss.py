"""The loss that a model returns itself."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import ModelRaised, SkipCheck, sentence
from ..model.reading import find_loss, find_scores, follow
from ..model.subject import Model, Subject
from ..model.tokens import draw, others
from ..search.copies import awake
from ..search.rounding import floor_of, gaps, rounding

IGNORED = (-100, -1)  # PyTorch's own mark for no target, and minGPT's


def check_loss(subject: Subject) -> str:
    """The loss is the mean cross-entropy of the model's own scores.

    Why: a loss shifted once too often trains the wrong task; a sum, or a
    mean over padding, changes the learning rate with the batch.
    How: where the model takes targets: the scores must not move with them,
    and the loss must equal the mean cross-entropy, of the targets as given
    or shifted by one inside, with and without targets that are marked as
    absent (-100 or -1, where the model takes such marks).
    Cost: some eight small forwards.
    Reports: huggingface/transformers 44642, targets shifted by the caller
    and once more by the model.
    """
    if subject.target_name is None:
        return "the model takes no targets, so nothing moves with them"
    if subject.block_size < 3:
        raise SkipCheck("a shifted loss needs three tokens")
    verdicts = []
    for model in (subject.precise(), awake(subject)):
        if model is not None:
            verdicts.append(_check_loss_of(subject, model))
    return verdicts[0]


def _check_loss_of(subject: Subject, model: Model) -> str:
    generator = torch.Generator().manual_seed(subject.seed)
    vocab, time = subject.vocab_size, min(6, subject.block_size)
    batch = 4 if time != 4 else 5
    tokens = draw(vocab, batch, time, generator)
    first = draw(vocab, batch, time, generator)
    second = others(first, vocab, generator)
    scores, loss = _call(subject, model, tokens, first)
    again, _ = _call(subject, model, tokens, second)
    if scores is not None and again is not None:
        moved = gaps(scores, again)
        if float(moved.max()) > floor_of(scores.dtype) * rounding(scores):
            position = int(moved.amax(0).argmax())
            raise AssertionError(
                f"the scores move with {subject.target_name}: those of "
                f"position {position} by {float(moved.max()):.2g}"
            )
    if scores is None:
        scores = subject.scores(model, tokens.to(subject.device))
    if loss is None:
        return f"takes {subject.target_name}, returns no loss of one number"
    if not torch.isfinite(loss):
        raise AssertionError(f"the loss is {float(loss)}")
    shift = _shift_of(scores, first.to(scores.device), loss, None, subject)
    words = ("as given", "shifted by one inside")[shift]
    for mark in IGNORED:
        marked = first.clone()
        marked[0, 1:] = mark  # rows of unlike length
        marked[1, : time // 2] = mark
        try:
            scores_, loss = _call(subject, model, tokens, marked)
        except ModelRaised:
            continue
        if loss is None:
            continue
        if scores_ is not None:
            scores = scores_
        if not torch.isfinite(loss):
            raise AssertionError(
                f"the loss is {float(loss)} with targets {mark}"
            )
        if _counts_mark(scores, marked, loss, mark, shift):
            continue  # to this model the mark is an id like any other
        _shift_of(scores, marked.to(scores.device), loss, mark, subject)
        words += f", {mark} left out"
    return f"mean cross-entropy of {subject.target_name} {words}"


def _counts_mark(
    scores: Tensor, marked: Tensor, loss: Tensor, mark: int, shift: int
) -> bool:
    """Whether the loss takes a mark for an id, as negative indexing does."""
    return (
        False
        if mark == -100
        else _close(
            _mean(scores, marked.remainder(scores.size(-1)), shift, None), loss
        )
    )


def _call(
    subject: Subject, model: Model, tokens: Tensor, targets: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return scores and loss of the native call with targets."""
    if isinstance(model, nn.Module):
        model.eval()
    batch, time = tokens.shape
    given: dict[str, Any] = {
        subject.target_name or "": targets.to(subject.device)
    }
    try:
        with torch.no_grad():
            answer = subject.native(model, tokens.to(subject.device), **given)
    except Exception as error:
        raise ModelRaised(
            f"the model raised {sentence(error)} when given "
            f"{subject.target_name}"
        ) from error
    scores = None
    for path, form in find_scores(answer, batch, time, subject.vocab_size):
        scores = form.read(follow(answer, path), batch, time)
        break
    return scores, find_loss(answer)


def _mean(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    shift: int,
    mark: int | None,
    total: bool = False,
) -> Float[Tensor, ""]:
    if shift:
        scores, targets = scores[:, :-shift], targets[:, shift:]
    return F.cross_entropy(
        scores.flatten(0, 1).double(),
        targets.flatten().to(scores.device),
        ignore_index=-100 if mark is None else mark,
        reduction="sum" if total else "mean",
    )


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-5 if b.dtype in (torch.float32, torch.float64) else 1e-2
    return bool((a - b).abs() <= tolerance * (1 + a.abs()))


def _shift_of(
    scores: Float[Tensor, "batch time vocab"],
    targets: Int[Tensor, "batch time"],
    loss: Float[Tensor, ""],
    mark: int | None,
    subject: Subject,
) -> int:
    """Return the shift at which the loss is right, or raise."""
    batch, time = targets.shape
    loss = loss.double()
    for shift in (0, 1):
        if _close(_mean(scores, targets, shift, mark), loss):
            return shift
    nearest: dict[str, Callable[[], Tensor]] = {}
    for shift, words in ((0, ""), (1, ", shifted by one"), (2, "")):
        mean = _mean(scores, targets, shift, mark)
        total = _mean(scores, targets, shift, mark, total=True)
        if shift == 2:
            nearest["shifted twice"] = mean.clone
            continue
        nearest[f"summed{words}"] = total.clone
        nearest[f"summed over time, averaged over the batch{words}"] = (
            total / batch
        ).clone
        nearest[f"summed over the batch, averaged over time{words}"] = (
            total / (time - shift)
        ).clone
        nearest[f"averaged over padding, too{words}"] = (
            total / (batch * (time - shift))
        ).clone
        nearest[f"divided by all positions{words}"] = (
            total / (batch * time)
        ).clone
        nearest[f"in bits{words}"] = (mean / math.log(2)).clone
        nearest[f"of probabilities taken for logits{words}"] = _mean(
            scores.softmax(-1), targets, shift, mark
        ).clone
    expected = float(_mean(scores, targets, 0, mark))
    shifted = float(_mean(scores, targets, 1, mark))
    name = min(nearest, key=lambda n: float((nearest[n]() - loss).abs()))
    hint = (
        f"it is the cross-entropy {name}"
        if _close(nearest[name](), loss)
        else f"nearest is that {name}, {float(nearest[name]()):.6g}"
    )
    where = "" if mark is None else f" with targets of {mark}"
    raise AssertionError(
        f"the loss is {float(loss):.6g}{where}, but the mean cross-entropy "
        f"of the model's own scores is {expected:.6g}, or {shifted:.6g} "
        f"shifted by one: {hint}"
    )
