"""No gradient is missing."""

from contextlib import suppress

import torch
from torch import Tensor

from ..cases import TRAIN
from ..check import Subject, check
from ..errors import SkipCheck, during
from ..larger_weights import larger
from ..losses import cross_entropy, scores_and_loss
from ..model.reading import tensors_in
from ..model.subclasses import quantised
from ..tokens import rows_at_once
from ..variant import Variant, changeable

ROUNDING_SHARE = 1e-6  # of the largest gradient: in float32, rounding


@check()
def check_gradient_flow(subject: Subject) -> str:
    """Over several batches every trainable parameter gets a gradient.

    Why: a parameter that the optimiser never moves is dead weight: a layer
    that is never called, a detached branch, two factors that are both 0.
    How: train mode, cross-entropy of random targets, batch after batch, and
    with it the loss that the model returns; what has no gradient then is
    tried with zeros redrawn, and, if it has one there, once more after three
    steps. Mere rounding (a key's bias) and frozen parameters pass and are
    mentioned.
    Reports: state-spaces/s4 26, parameters that are used and yet get no
    gradient.
    """
    subject.require_gradients()
    function = "a function has no parameters to see"
    variant = changeable(subject, function, TRAIN)
    model = variant.model
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    if frozen and len(frozen) == len([*model.parameters()]):
        raise SkipCheck("every parameter is frozen")
    sizes = _gradient_sizes(variant)
    without = [name for name, size in sizes.items() if size == 0]
    stuck = ""
    if without:
        copy = larger(subject)
        if copy is not None:
            again = _gradient_sizes(copy.run_as(TRAIN))
            without = [name for name in without if not again.get(name)]
        if not without:
            without = _stuck_at_zero(variant)
            stuck = ": factors that are both 0"
    if without:
        never = (
            f"{len(without)} of {len(sizes)} trainable parameters never get "
            f"a gradient: {_first(without, 4)}{stuck}"
        )
        if why := quantised(model):
            raise SkipCheck(f"{why}, and nothing is trained before: {never}")
        raise AssertionError(never)
    if not sizes:
        raise AssertionError("the model has no trainable parameter")
    largest = max(sizes.values())
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    unit = max(torch.finfo(dtype).eps for dtype in kinds)
    share = max(ROUNDING_SHARE, 16 * unit)
    faint = [n for n, s in sizes.items() if 0 < s < share * largest]
    notes = f"{len(sizes)} parameters"
    if faint:
        notes += f"; only rounding reaches {len(faint)}: {_first(faint, 3)}"
    if frozen:
        notes += f"; frozen: {_first(frozen, 3)}"
    return notes


def _first(names: list[str], count: int) -> str:
    """Return the first names, and how many follow."""
    more = len(names) - count
    rest = f" and {more} more" if more > 0 else ""
    return ", ".join(names[:count]) + rest


def _backward_of_own_loss(
    variant: Variant, tokens: Tensor, targets: Tensor
) -> None:
    """Add the gradients of the loss that a model returns, if it does."""
    if variant.subject.caller.target_name is None:
        return
    loss = None
    with suppress(AssertionError):  # the matter of check_loss
        _, loss = scores_and_loss(variant, tokens, targets)
    if loss is not None and loss.requires_grad:
        with during("in the backward pass of the loss"):
            loss.backward()


def _backward_of_all_scores(variant: Variant, tokens: Tensor) -> None:
    """Add the gradients of whatever else is a score of each id."""
    width = variant.subject.reader.width
    answer = variant.answer(tokens, grad=True)
    others = [
        scores.log_softmax(-1)[..., 0].mean()
        for _, scores in tensors_in(answer)
        if scores.requires_grad and scores.shape[-1:] == (width,)
    ]
    if others:
        with during("in the backward pass of all its scores"):
            torch.stack(others).sum().backward()


def _stuck_at_zero(variant: Variant) -> list[str]:
    """Return what still has no gradient after some steps, if it is all 0."""
    parameters = dict(variant.model.named_parameters())
    left: list[str] = []
    for _ in range(3):
        with torch.no_grad():
            for p in parameters.values():
                if p.grad is not None:
                    p.sub_(p.grad.to_dense().sign(), alpha=1e-2)
        sizes = _gradient_sizes(variant)
        left = [name for name, size in sizes.items() if size == 0]
    return left if not any(parameters[n].any() for n in left) else []


def _gradient_sizes(variant: Variant) -> dict[str, float]:
    """Return the largest gradient entry that each parameter ever got."""
    subject, model = variant.subject, variant.model
    generator, short = subject.generator(), subject.lengths.fit(32)
    vocab = subject.vocab_size
    trainable = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
    sizes = dict.fromkeys(trainable, 0.0)
    for seed in range(16):
        # a part may act in long texts only
        time = subject.block_size if seed % 4 == 3 else short
        batch = max(1, min(8, rows_at_once(vocab, time) // 4))
        tokens, targets = (
            subject.draw(batch, time, generator) for _ in range(2)
        )
        model.zero_grad()
        scores = variant.scores(tokens, grad=True, seed=seed)
        if not scores.requires_grad:
            row = tokens[:1]
            scores = subject.read(variant.answer(row), *row.shape)
            if why := quantised(model):
                raise SkipCheck(f"{why}: no gradient passes")
            if scores.is_inference():
                raise SkipCheck("the model answers in inference mode")
            raise AssertionError(
                "the scores carry no gradient in train mode: something "
                "detaches them"
            )
        if scores.dtype != torch.float64:
            scores = scores.float()
        with during("in the backward pass in train mode"):
            cross_entropy(scores, targets).backward()
        if seed > 0:  # something has no gradient by the scores
            _backward_of_own_loss(variant, tokens, targets)
            _backward_of_all_scores(variant, tokens)
        for name, parameter in trainable.items():
            if parameter.grad is not None:
                # NaN is check_finite's matter
                grad = parameter.grad.to_dense().nan_to_num(nan=1.0)
                sizes[name] = max(sizes[name], float(grad.abs().max()))
        if all(sizes.values()):
            break
    return sizes
