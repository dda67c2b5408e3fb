"""Check the loss that a model returns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...running.context import during
from ...running.errors import FailureAt, ModelRaised, SkipCheck
from ...running.losses import (
    MOST_SMOOTHED,
    added_to,
    close,
    mean_loss,
    scores_and_loss,
    shifts_of,
    tolerance_of,
    wrong_loss,
)
from ...running.model.building import hooked
from ...running.operations import (
    functions_through,
    operations_through,
    quantised,
)
from ...running.ranks import current
from ...running.rounding import Inside, differ, floor, gaps
from ...running.tokens import others
from ...running.tolerances import FLOOR_UNITS
from ...running.variant import Variant, one_by_one
from ...running.ways import TRAIN, WITH_GRADIENTS
from ..check import Subject, check
from ..derivatives import gradients_of, own_functions, place_of_backward
from .gradients import Attached
from .gradients.differences import (
    COARSE,
    PIECEWISE,
    ROUGH,
    Along,
    free_parameters,
)

HOW = ("as given", "shifted by one inside")
LONGEST = 33  # most tokens of a text
IGNORED = (-100, -1)  # targets to be ignored: PyTorch's mark, minGPT's


@check(needs="targets", weight=3)
def check_loss(subject: Subject) -> str:
    """The loss is the mean cross-entropy of the model's own scores.

    Why: a loss shifted once too often trains the wrong task. With a sum, or a
    mean over padding, the size of a training step depends on the batch.
    How: scores must not depend on targets. The loss and its gradient must
    equal those of the mean cross-entropy. The model may use targets as given,
    or shift them by one. This is tried at several lengths, with every id, and
    with ignored targets.
    If it fails: the message names a common mistake that gives this loss, such
    as a sum, a second shift, or a loss over padding. Some additions to the
    mean pass with a note. These are a term that targets do not change (a
    z-loss, a router's balance), a term of other scores (another head's), and
    labels that are smoothed only in train mode.
    Reports: huggingface/transformers 44642, targets shifted twice.
    """
    if subject.caller.target_name is None:
        raise SkipCheck("the model takes no targets")
    subject.require_no_state()
    if subject.block_size < 3:
        raise SkipCheck("a shifted loss needs three tokens")
    first, *again = map(_check_loss_of, one_by_one(subject, LONGEST))
    # both shifts fit, as with a head of zeros
    unclear = len(first.shifts) == len(HOW)
    return (again[0] if again and unclear else first).says


@dataclass(frozen=True)
class _Found:
    """Facts about a model's loss."""

    says: str
    shifts: frozenset[int] = frozenset()  # how far targets are shifted


@dataclass(frozen=True)
class _Loss:
    """How a model computes its loss from scores and targets."""

    tokens: Int[Tensor, "batch time"]
    # the scores over which the loss takes its softmax
    scores: Float[Tensor, "batch time vocab"]
    shifts: set[int]  # how far targets are shifted: 0, 1, or both if both fit
    added: float | None  # term added to the mean; None if it varies by text
    note: str


def _check_loss_of(variant: Variant) -> _Found:
    subject = variant.subject
    generator, vocab = subject.generator(), subject.vocab_size
    time, name = subject.lengths.fit(6), subject.caller.target_name
    rows = subject.fit_rows(4 if time != 4 else 5)
    first = subject.draw(rows, time, generator)
    case = _loss_of(variant, first, generator)
    if case is None:
        return _Found(f"takes {name}, returns no loss of one number")
    shifts = case.shifts
    for batch, length in ((3, 7), (1, 13), (2, LONGEST)):
        time, batch = subject.lengths.fit(length), subject.fit_rows(batch)
        # the targets are the last ids at one length, and the first ids at the
        # others
        start = -batch * time if length == LONGEST else -1
        ids = (torch.arange(batch * time) + start).view(batch, time) % vocab
        other = _loss_of(variant, ids, generator)
        if other is None:
            raise AssertionError(f"no loss for {batch} x {time} {name}")
        if not shifts & other.shifts:
            raise AssertionError(
                f"the loss is that of {name} {HOW[min(shifts)]}, and for "
                f"{batch} x {time} of them {HOW[min(other.shifts)]}"
            )
        shifts = shifts & other.shifts
    case = replace(case, shifts=shifts)
    found = " or ".join(HOW[s] for s in sorted(shifts)) + case.note
    found += _try_marks(variant, first, case)
    _require_gradient(variant, first, case)
    # last, because a call in train mode may change what eval mode reads
    more = _require_same_in_training(variant, first, shifts, generator)
    for mode, note in ((WITH_GRADIENTS, case.note), (TRAIN, more)):
        _require_differences(variant.run_as(mode), case.tokens, first, note)
    if more is not None and bool(more) != bool(case.note):
        found += f"; in train mode{more or ' nothing is added'}"
    says = f"mean cross-entropy of {name} {found}"
    return _Found(says, frozenset(shifts))


def _require_same_in_training(
    variant: Variant,
    targets: Tensor,
    shifts: set[int],
    generator: torch.Generator,
) -> str | None:
    """Require that train mode shifts targets as eval mode does.

    Returns:
        A note on the term that train mode adds; None without a loss to judge.
    """
    trained = variant.run_as(TRAIN)
    rows, time = targets.shape
    tokens = variant.subject.draw(rows, time, generator)
    scores, _ = scores_and_loss(trained, tokens, targets)
    if scores is None and not torch.equal(
        trained.scores(tokens), variant.scores(tokens)
    ):
        return None  # dropout differs between the two calls
    try:
        case = _loss_of(trained, targets, generator)
    except ModelRaised:
        raise
    except AssertionError as error:
        raise AssertionError(f"in train mode {error}") from None
    if case is not None and not shifts & case.shifts:
        name = variant.subject.caller.target_name
        raise AssertionError(
            f"in train mode the loss is that of {name} "
            f"{HOW[min(case.shifts)]}, in eval mode {HOW[min(shifts)]}"
        )
    return None if case is None else case.note


def _loss_of(
    variant: Variant, first: Tensor, generator: torch.Generator
) -> _Loss | None:
    """Return how the loss is computed, None without a loss; or raise."""
    subject = variant.subject
    tokens = subject.draw(len(first), first.size(1), generator)
    second = others(first, subject.vocab_size, generator)
    for ids in (first, second):
        _replace_hidden(subject, ids)
    scores, loss = scores_and_loss(variant, tokens, first)
    again, second_loss = scores_and_loss(variant, tokens, second)
    if scores is None or again is None:
        scores = variant.scores(tokens)
    else:
        _require_same_scores(variant, tokens, scores, again)
    if loss is None:
        return None
    if shifts := shifts_of(scores, first, loss):
        return _Loss(tokens, scores, shifts, 0.0, "")
    found = None
    if second_loss is not None:
        third = others(second, subject.vocab_size, generator)
        _replace_hidden(subject, third)
        _, third_loss = scores_and_loss(variant, tokens, third)
        if third_loss is not None:
            found = _with_a_term(
                variant,
                tokens,
                scores,
                targets=(first, second, third),
                losses=(loss, second_loss, third_loss),
            )
    found = found or _beside_other_terms(variant, tokens, scores, first, loss)
    if found is None:
        raise wrong_loss(scores, first, loss)
    return found


def _replace_hidden(subject: Subject, ids: Tensor) -> None:
    """Replace, among targets, the ids whose score is minus infinity."""
    hidden = torch.tensor(subject.hidden, dtype=torch.long)
    ids[torch.isin(ids, hidden)] = subject.scored[0]


def _require_same_scores(
    variant: Variant, tokens: Tensor, scores: Tensor, again: Tensor
) -> None:
    """Require that targets do not change the scores.

    `again` has the scores of a call with other targets.
    """
    subject, name = variant.subject, variant.subject.caller.target_name
    if differ(scores.detach(), again.detach()):
        moved = gaps(scores.detach(), again.detach()).amax(0)
        raise AssertionError(
            f"the scores move with {name}: those of position "
            f"{int(moved.argmax())} by {float(moved.max()):.2g}"
        )
    if name in subject.caller.given or variant.case.training:
        return
    own = subject.without_hidden(scores)
    pair = [x.log_softmax(-1) for x in (own, variant.scores(tokens))]
    size = float(gaps(*pair).max())
    if size > 2 * max(map(floor, pair)):
        raise AssertionError(
            f"the scores with {name} are {size:.2g} from those without"
        )


def _with_a_term(
    variant: Variant,
    tokens: Tensor,
    scores: Tensor,
    targets: Sequence[Tensor],
    losses: Sequence[Tensor],
) -> _Loss | None:
    """Explain losses as the mean cross-entropy plus a term; None if wrong.

    If the head is padded, all its scores are tried before those of the ids.
    """
    wide = _before_the_cut(variant, tokens, scores)
    for each in [scores] if wide is None else [wide, scores]:
        shifts, added, note = _explained(variant, each, targets, losses)
        if shifts and each is wide:
            note = f" over the {wide.size(-1)} scores of a padded head"
        if shifts:
            return _Loss(tokens, each, shifts, added, note)
    return None


def _beside_other_terms(
    variant: Variant,
    tokens: Tensor,
    scores: Tensor,
    targets: Tensor,
    loss: Tensor,
) -> _Loss | None:
    """Explain a loss as the mean plus a term from other tensors, or None."""
    fits = _besides(variant, tokens, targets)
    if not fits:
        return None
    share, mean = max(fits.values()), mean_loss(scores, targets, min(fits))
    note = f" smoothed by {share:.2g}" * (share > 0)
    note += f" plus {float((loss - mean).detach()):.3g}, not of these scores"
    return _Loss(tokens, scores, {*fits}, None, note)


def _explained(
    variant: Variant,
    scores: Tensor,
    targets: Sequence[Tensor],
    losses: Sequence[Tensor],
) -> tuple[set[int], float | None, str]:
    """Return the shifts, the added term and the words that explain losses."""
    shifts = shifts_of(scores, targets[0], losses[0])
    if shifts:
        return shifts, 0.0, ""
    shifts, added, share = added_to(scores.detach(), targets, losses)
    if share and not variant.case.training:
        raise AssertionError(
            f"in eval mode the loss is of "
            f"{variant.subject.caller.target_name} smoothed by {share:.2g}: "
            f"no perplexity follows from it"
        )
    note = f" smoothed by {share:.2g}" * (share > 0)
    if added:
        note += f" plus {added:.3g}, which targets do not change"
    return shifts, None if share else added, note


def _try_marks(variant: Variant, targets: Tensor, case: _Loss) -> str:
    """Return in words which targets the mean ignores, or raise."""
    found = ""
    for mark in IGNORED:
        marked = targets.clone()
        # targets end early in row 0 and begin late in row 1
        marked[0, 2:] = mark
        marked[1:2, : targets.size(1) // 2] = mark
        try:
            _, loss = scores_and_loss(variant, case.tokens, marked)
        except ModelRaised:
            continue
        if loss is None:
            continue
        terms = [case.added or 0.0]
        # the added term may be a z-loss of the counted positions
        if case.added:
            squares = case.scores.double().logsumexp(-1).square()
            share = float(squares[marked != mark].mean() / squares.mean())
            terms.append(case.added * share)
        if mark != -100:
            # some models take -1 as an index, which means the last id
            ids = marked.remainder(case.scores.size(-1))
            mean = mean_loss(case.scores, ids, min(case.shifts))
            if any(close(mean, loss - term) for term in terms):
                continue
        if not any(
            shifts_of(case.scores, marked, loss - term, mark) for term in terms
        ) and not _besides(variant, case.tokens, marked, mark):
            raise wrong_loss(case.scores, marked, loss - terms[0], mark)
        found += f", {mark} left out"
    return found


def _besides(
    variant: Variant, tokens: Tensor, targets: Tensor, mark: int | None = None
) -> dict[int, float]:
    """Return, by shift of the targets, the share of smoothed targets.

    The loss may have another term than the mean cross-entropy. A shift is
    returned if the gradients of the loss and of the mean at the scores are
    equal, because the term uses other scores. It is also returned if other
    targets change both gradients equally, because the term does not depend on
    targets.
    """
    subject, training = variant.subject, variant.case.training
    if subject.in_arrays:
        return {}
    run = variant.run_as(TRAIN if training else WITH_GRADIENTS)
    second = (targets + 1) % subject.vocab_size
    _replace_hidden(subject, second)
    second = torch.where(targets < 0, targets, second)
    one = _gradient_by_scores(run, tokens, targets)
    if one is None:
        return {}
    scores, found = one
    bound, fits = 10 * tolerance_of(scores), dict[int, float]()
    wanted = {s: _wanted(scores, targets, s, mark) for s in (0, 1)}
    for shift, gradient in wanted.items():
        if (found - gradient).norm() <= bound * gradient.norm():
            fits[shift] = 0.0
    if fits or (two := _gradient_by_scores(run, tokens, second)) is None:
        return fits
    for shift, gradient in wanted.items():
        step = gradient - _wanted(two[0], second, shift, mark)
        moved = found - two[1]
        share = float(1 - (moved * step).sum() / step.square().sum())
        if (moved - (1 - share) * step).norm() > bound * step.norm():
            continue
        if abs(share) <= bound:
            fits[shift] = 0.0
        elif training and 0 < share < MOST_SMOOTHED:
            left = found - _wanted(scores, targets, shift, mark, share)
            if _is_z_loss(left, scores, bound * gradient.norm()):
                fits[shift] = share
    return fits


def _gradient_by_scores(
    run: Variant, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return scores with a graph, and the loss's gradient at the scores."""
    scores, loss = scores_and_loss(run, tokens, targets)
    if scores is None or loss is None or not scores.requires_grad:
        return None
    found = _by_base(loss, scores)
    return (scores, found) if found.any() else None


def _by_base(value: Tensor, scores: Tensor) -> Tensor:
    """Return a value's gradient at the scores, or at the tensor they view."""
    base = scores if scores._base is None else scores._base
    (found,) = gradients_of(
        value, [base], retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(base).double() if found is None else found.double()


def _wanted(
    scores: Tensor,
    targets: Tensor,
    shift: int,
    mark: int | None,
    share: float = 0.0,
) -> Tensor:
    """Return the gradient of the mean cross-entropy at the scores."""
    mean = mean_loss(scores, targets, shift, mark, smoothed=share)
    return _by_base(mean, scores)


def _is_z_loss(left: Tensor, scores: Tensor, bound: Tensor) -> bool:
    """Return whether a gradient is 0 or that of a z-loss.

    The loss may leave out the last position.
    """
    for kept in (scores, scores[:, :-1]):
        squares = kept.double().logsumexp(-1).square().mean()
        along = _by_base(squares, scores)
        share = (left * along).sum() / along.square().sum()
        if (left - share * along).norm() <= bound:
            return True
    return False


def _require_gradient(variant: Variant, targets: Tensor, case: _Loss) -> None:
    """Require that the loss has the gradient of the cross-entropy."""
    weights = [p for p in variant.parameters if p.requires_grad and p.numel()]
    no_gradients = variant.subject.caller.no_gradients
    if not weights or no_gradients or quantised(variant.model):
        return
    trained, evaluated = map(variant.run_as, (TRAIN, WITH_GRADIENTS))
    # train mode first: its call may change weights that are in the graph of
    # the call in eval mode
    in_training, its_loss = scores_and_loss(trained, case.tokens, targets)
    scores, loss = scores_and_loss(evaluated, case.tokens, targets)
    if its_loss is None or (
        in_training is not None and not in_training.requires_grad
    ):
        return
    if not its_loss.requires_grad:
        raise AssertionError(
            "the loss has no graph: its backward pass trains nothing"
        )
    # `_require_differences` judges a loss with a further term
    if scores is None or loss is None or case.note:
        return
    if not (scores.requires_grad and loss.requires_grad):
        return

    def gradient(value: Tensor) -> float:
        found = gradients_of(
            value, weights, retain_graph=True, materialize_grads=True
        )
        # in float64: norms may overflow in 16 bits
        norms = (float(g.to_dense().double().norm()) for g in found)
        return math.hypot(*norms)

    sizes = []
    # compare with one shift's gradients at a time, to save memory
    for shift in case.shifts:
        mean = mean_loss(scores, targets, shift)
        with during("in the backward pass of the loss"):
            sizes.append((gradient(loss - mean), gradient(mean)))
    apart, size = min(sizes)
    if apart > 100 * tolerance_of(scores) * size:
        raise AssertionError(
            f"the gradient of the loss is not that of the cross-entropy of "
            f"the scores: {apart:.3g} apart, of {size:.3g}"
        )


def _require_differences(
    run: Variant, tokens: Tensor, targets: Tensor, note: str | None
) -> None:
    """Require the gradient that finite differences of the loss give.

    This is for a loss that is returned without scores, or has a further term.
    """
    subject = run.subject
    model, no_gradients = run.model, subject.caller.no_gradients
    if no_gradients or current() is not None or quantised(model):
        return
    free = free_parameters(model) if isinstance(model, nn.Module) else {}
    run.start_again()
    with operations_through(Inside()) as inside:
        scores, loss = scores_and_loss(run, tokens, targets)
    if (scores is not None and not note) or inside.operations & PIECEWISE:
        return
    if loss is None or not loss.requires_grad or inside.unit > COARSE:
        return
    functions = own_functions(loss)
    with during("in the backward pass of the loss"):
        found = gradients_of(
            loss, [p for p, _ in free.values()], materialize_grads=True
        )
    gradients = {
        n: g.to_dense() for n, g in zip(free, found, strict=True) if g.any()
    }
    size = abs(float(loss.detach()))
    along = _along(run, tokens, targets, free, gradients, inside.unit, size)
    pair = along.smoothest([*gradients])
    if pair.agree or pair.share <= ROUGH:
        return
    run.start_again()
    with functions_through(Attached()) as attached:
        scores_and_loss(run, tokens, targets)
    # the model detaches a part on purpose, such as a teacher
    if attached.places:
        return
    place = place_of_backward(functions)
    where = f" at {place}" if place else ""
    raise FailureAt(
        f"the gradient of the loss is not the loss's own, {run.case.mode}: "
        f"along it the backward pass says {pair.backward:.4g}, differences of "
        f"the loss say {pair.difference:.4g} (+- {pair.uncertain:.1g}), "
        f"{pair.backward / pair.difference:.3g} times{where}",
        place,
    )


def _along(
    run: Variant,
    tokens: Tensor,
    targets: Tensor,
    free: dict[str, tuple[nn.Parameter, int | None]],
    gradients: dict[str, Tensor],
    unit: float,
    size: float,
) -> Along:
    """Return a comparison of gradients with finite differences of the loss.

    `unit` is the model's unit of rounding, `size` the size of the loss.
    """

    def value() -> float:
        run.start_again()
        _, loss = scores_and_loss(run, tokens, targets)
        assert loss is not None
        return float(loss.detach())

    return Along(
        free,
        gradients,
        value,
        unit ** (1 / 3),
        FLOOR_UNITS * unit * size,
        run.subject.generator(),
        towards=gradients,
    )


def _before_the_cut(
    variant: Variant, tokens: Tensor, scores: Tensor
) -> Tensor | None:
    """Return a module's output whose first columns are the scores, or None."""
    model, vocab = variant.model, scores.size(-1)
    found: list[Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: Any, answer: Any) -> None:
        if not isinstance(answer, Tensor) or answer.shape[-1:] <= (vocab,):
            return  # no wider than the vocabulary, such as a loss
        if answer[..., :vocab].equal(scores):
            found.append(answer)

    with hooked(model.modules() if isinstance(model, nn.Module) else (), look):
        variant.scores(tokens)
    return found[0] if found else None
