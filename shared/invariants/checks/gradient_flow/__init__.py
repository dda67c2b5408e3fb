"""Each trainable parameter gets a gradient."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from ....running.context import during
from ....running.errors import SkipCheck
from ....running.losses import cross_entropy, scores_and_loss
from ....running.model.calling import tensors_in
from ....running.operations import quantised
from ....running.ranks import current, largest_of, local, local_gradient
from ....running.rounding import differ, put_back_after
from ....running.tokens import rows_at_once
from ....running.tolerances import FLOAT32_SHARE
from ....running.variant import Variant, changeable, doubled, larger
from ....running.ways import TRAIN
from ...check import Subject, check
from .dead_parts import (
    Reason,
    Slices,
    add_alive,
    in_words,
    reasons,
)

# training steps: enough for one factor to leave 0 and another to be trained
STEPS = 5
OWN_LOSS = "of the loss"


@check(needs="gradients", weight=3)
def check_gradient_flow(subject: Subject) -> str:
    """Over several batches every trainable parameter gets a gradient.

    Why: a parameter that the optimiser never moves is useless. Examples are a
    layer that is never called, a detached branch, or two factors that are both
    0. Part of a parameter may also be useless, such as hidden units that are
    cut off, or positions that share a row.
    How: gradients are those of the cross-entropy of random targets, in train
    mode, and of the model's own loss. If a parameter has no gradient, its
    zeros are redrawn. If it then has a gradient, the original weights are
    trained for some steps. After these the parameter must have a gradient.
    Rows, columns and vector entries without a gradient are tried again in the
    longest texts and with other weights. A matrix whose gradient is only
    rounding is judged again after some steps. A key's bias, frozen parameters
    and rows that texts do not reach pass with a note.
    If it fails: a parameter that the message names is never used, or its
    result is detached. "Factors that are both 0": start one of them at random.
    "16 of 32 rows of wpe.weight never move a score": these rows are useless.
    Rows that move scores without a gradient are detached. Rows that longer
    texts or another choice of experts may reach pass with a note. So do rows
    of a head that belong to no id. check_vocabulary judges the rows of ids. A
    parameter with a hook on its gradient is left out.
    Reports: issue state-spaces/s4 26, parameters in use without a gradient.
    """
    subject.require_gradients()
    variant = changeable(subject, "a function has no parameters to see", TRAIN)
    model = variant.model
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    if frozen and len(frozen) == len([*model.parameters()]):
        raise SkipCheck("every parameter is frozen")
    alive: Slices = {}
    scored: set[str] = set()
    sizes = _gradient_sizes(variant, None, alive, scored)
    if not sizes:
        raise AssertionError("the model has no trainable parameter")
    subject.budget.something_tried = True
    _require_gradients(variant, sizes)
    # quantised weights cannot be redrawn, so their parts are not judged
    parts = {} if quantised(model) else _reasons(variant, alive)
    for fault in (Reason.DETACHED, Reason.NEVER, Reason.BOTH_ZERO):
        if fault in parts:
            raise AssertionError(f"{_first(parts[fault], 3)} {fault}")
    unit = max(
        torch.finfo(p.dtype).eps for p in variant.parameters if p.requires_grad
    )
    least = max(FLOAT32_SHARE, 16 * unit) * max(sizes.values())
    faint = [name for name, size in sizes.items() if 0 < size < least]
    _require_more_than_rounding(subject, faint, len(sizes))
    by_loss = _by_loss_alone(subject, sizes, scored)
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks]
    notes = {
        f"only rounding reaches {len(faint)}": faint,
        f"only the returned loss, and no score, has a gradient for "
        f"{len(by_loss)}": by_loss,
        "frozen": frozen,
        "rows not judged, as a hook may mask their gradient": hooked,
        Reason.UNREACHED: parts.get(Reason.UNREACHED),
    }
    return f"{len(sizes)} parameters" + "".join(
        f"; {note}: {_first(names, 3)}"
        for note, names in notes.items()
        if names
    )


def _require_gradients(variant: Variant, sizes: dict[str, float]) -> None:
    """Require a gradient for each parameter, perhaps after training steps."""
    without = [name for name, size in sizes.items() if size == 0]
    if not without:
        return
    copy, stuck = larger(variant.subject), ""
    if copy is not None:
        again = _gradient_sizes(copy.run_as(TRAIN))
        without = [name for name in without if not again.get(name)]
    if not without:
        without = _stuck_at_zero(variant)
        stuck = ": factors that are both 0"
    never = (
        f"{len(without)} of {len(sizes)} trainable parameters never get "
        f"a gradient: {_first(without, 4)}{stuck}"
    )
    if without and (why := quantised(variant.model)):
        raise SkipCheck(f"{why}, and nothing is trained before: {never}")
    if without:
        raise AssertionError(never)


def _require_more_than_rounding(
    subject: Subject, faint: list[str], count: int
) -> None:
    """Require a gradient above rounding in each matrix, after training steps.

    The gradient of a key's bias may be only rounding, because softmax cancels
    the bias. But a matrix whose gradient is only rounding has no use.
    """
    if not faint or current() is not None:
        return
    variant = changeable(subject, case=TRAIN)
    if quantised(variant.model):
        return
    doubled(subject, variant.model)
    left = [name for name in faint if _is_matrix(variant, name)]
    # the length of the text by seed; with seed 0, the cross-entropy would be
    # the only loss
    time = {1: subject.lengths.fit(32)}
    for _ in range(STEPS if left else 0):
        sizes = _gradient_sizes(variant, time)
        least = FLOAT32_SHARE * max(sizes.values())
        left = [name for name in left if sizes[name] < least]
        _step(variant)
    if left:
        raise AssertionError(
            f"only rounding reaches {len(left)} of {count} trainable "
            f"parameters: {_first(left, 4)}: the gradient stays below "
            f"{FLOAT32_SHARE:.0e} of the largest, as where a weight is "
            f"divided by itself"
        )


def _is_matrix(variant: Variant, name: str) -> bool:
    """Return whether a parameter is a Linear weight, or moves the scores."""
    model = variant.model
    weight = model.get_parameter(name)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if any(weight is layer.weight for layer in layers):
        return True
    if sum(size > 1 for size in weight.shape) < 2:
        return False
    tokens = variant.subject.draw(2, variant.subject.lengths.fit(8))
    before = variant.scores(tokens)
    generator = variant.subject.generator()
    with put_back_after([weight]), torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=generator).to(weight))
        return bool(differ(variant.scores(tokens), before))


def _reasons(variant: Variant, alive: Slices) -> dict[Reason, list[str]]:
    """Describe, by reason, the rows and columns that have no gradient."""
    subject = variant.subject
    found = defaultdict[Reason, Slices](dict)
    with subject.budget.part("rows and columns", subject.block_size):
        for reason, key, slices in reasons(subject, alive, _gradient_sizes):
            found[reason][key] = slices
    if in_words(found[Reason.BOTH_ZERO]):
        again: Slices = {}
        _train(variant, again)
        for key, slices in found[Reason.BOTH_ZERO].items():
            slices &= ~again.get(key, slices)
    return {
        reason: words for reason, s in found.items() if (words := in_words(s))
    }


def _by_loss_alone(
    subject: Subject, sizes: dict[str, float], scored: set[str]
) -> list[str]:
    """Return the parameters that get a gradient, but from no score."""
    copy = None
    if current() is None and not scored.issuperset(sizes):
        copy = larger(subject)
    if copy is None:
        return []
    # also in train mode, where scores may depend on more parameters
    _gradient_sizes(copy.run_as(TRAIN), scored=scored)
    return [name for name in sizes if name not in scored]


def _first(names: list[str], count: int) -> str:
    """Return the first names and the count of the others, as a text."""
    more = len(names) - count
    rest = f" and {more} more" if more > 0 else ""
    return ", ".join(names[:count]) + rest


def _stuck_at_zero(variant: Variant) -> list[str]:
    """Return parameters that have no gradient because factors stay at 0.

    Parameters that are all 0 come first.
    """
    parameters = dict(variant.model.named_parameters())
    left = _train(variant, {})
    zeros = [n for n in left if n in parameters and not parameters[n].any()]
    others = [name for name in left if name not in zeros]
    return zeros + others if len(zeros) > 1 or not others else []


def _train(variant: Variant, alive: Slices) -> list[str]:
    """Take training steps; return parameters that still have no gradient."""
    left: list[str] = []
    for _ in range(STEPS):
        _step(variant)
        sizes = _gradient_sizes(variant, alive=alive)
        left = [name for name, size in sizes.items() if size == 0]
    return left


def _step(variant: Variant) -> None:
    """Move each entry of a parameter by 0.01 against its gradient's sign."""
    with torch.no_grad():
        for p in variant.model.parameters():
            if p.grad is not None:
                step = local_gradient(p.grad, p).sign()
                local(p).sub_(step, alpha=1e-2)


def _gradient_sizes(
    variant: Variant,
    lengths: dict[int, int] | None = None,
    alive: Slices | None = None,
    scored: set[str] | None = None,
) -> dict[str, float]:
    """Return the largest gradient entry of each parameter over all texts.

    `lengths` has the length of each seed's text. `alive` receives the rows and
    columns with a gradient, `scored` the parameters that get a gradient from
    scores.
    """
    subject, model = variant.subject, variant.model
    short = subject.lengths.fit(32)
    # for each seed, the length of its text: some parts need long texts
    several = dict(enumerate([*[short] * 3, subject.block_size] * 4))
    trainable = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
    sizes = dict.fromkeys(trainable, 0.0)
    for seed, time in (lengths or several).items():
        generator = torch.Generator().manual_seed(subject.seed + seed)
        batch = max(1, min(8, rows_at_once(subject.vocab_size, time) // 4))
        tokens, targets = (
            subject.draw(batch, time, generator) for _ in range(2)
        )
        model.zero_grad()
        for what, loss in _losses(variant, tokens, targets, seed):
            with during(f"in the backward pass {what}"):
                loss.backward()
            grads = {n: p.grad for n, p in trainable.items()}
            if scored is not None and what != OWN_LOSS:
                scored |= {
                    n for n, g in grads.items() if g is not None and g.any()
                }
        for name, parameter in trainable.items():
            if parameter.grad is not None:
                # NaN counts as a gradient of 1: check_finite reports it
                grad = local_gradient(parameter.grad, parameter)
                size = float(grad.nan_to_num(nan=1.0).abs().max())
                sizes[name] = max(sizes[name], size)
        if alive is not None and current() is None:
            add_alive(alive, trainable.items())
        sizes = largest_of(sizes)
        if all(sizes.values()):
            break
    return sizes


def _losses(
    variant: Variant, tokens: Tensor, targets: Tensor, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield losses, each with words for a failure of its backward pass.

    From the second seed on, while a parameter has no gradient, more losses
    follow: those of other tensors that score ids, and the model's own.
    """
    subject = variant.subject
    scores = variant.scores(tokens, grad=True, seed=seed)
    if not scores.requires_grad:
        if why := quantised(variant.model):
            raise SkipCheck(f"{why}: no gradient passes")
        row = tokens[:1]
        if subject.read(variant.answer(row), *row.shape).is_inference():
            raise SkipCheck("the model answers in inference mode")
        raise AssertionError(
            "the scores carry no gradient in train mode: something "
            "detaches them"
        )
    if scores.dtype != torch.float64:
        scores = scores.float()
    yield "in train mode", cross_entropy(scores, targets)
    if seed == 0:
        return
    others = [
        scores.log_softmax(-1)[..., 0].mean()
        for (ids,) in variant.in_rows(tokens)
        for _, scores in tensors_in(variant.answer(ids, grad=True))
        if scores.requires_grad
        and scores.shape[-1:] == (subject.reader.width,)
    ]
    if others:
        yield "of all its scores", torch.stack(others).sum()
    if subject.caller.target_name is None:
        return
    losses = list[Tensor | None]()
    # the model's own loss; check_loss reports its exceptions
    with suppress(AssertionError):
        for ids, aims in variant.in_rows(tokens, targets):
            losses.append(scores_and_loss(variant, ids, aims)[1])
    trained = [x for x in losses if x is not None and x.requires_grad]
    if trained:
        yield OWN_LOSS, torch.stack(trained).mean()
