"""Gradients: none from the future, and none missing."""

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import SkipCheck, asked
from ..model.subject import Subject
from ..model.tokens import SHORT, SPLITS, draw, rows_at_once, splits_to_try
from ..search.larger_weights import Searches, amplified
from ..search.leaks import Search
from ..search.tolerance import FLOOR, is_real
from ..search.trial import EVAL, Mode
from .cross_entropy import cross_entropy
from .embedding import gradients_at
from .loss import scores_and_loss

ROUNDING_SHARE = 1e-6  # of the largest gradient: in float32, rounding


def check_causal_gradients(subject: Subject) -> str:
    """The gradient of output t by the embedding of a later token is 0.

    Why: a custom backward may leak where values do not.
    How: row t of equal rows has the gradient of a random combination of
    position t's scores; what lies after t must be 0 to rounding. In eval and
    train mode, and with larger weights.
    Cost: one forward and backward for each of some eight lengths.
    Reports: triton-lang/triton 4541, a backward kernel that ignores the
    causal flag of its forward.
    """
    longest = subject.block_size
    if longest < 2:
        raise SkipCheck("one token has no future")
    generator = subject.generator()
    train = Mode("in train mode", training=True)
    tried = [(search, EVAL) for search in Searches(subject)]
    tried.append((Search(subject, subject.precise()), train))
    for search, mode in tried:
        for time in subject.fit(2, 3, 7, SHORT):
            _require_none_ahead(search, mode, time, generator)
    if subject.spares:
        tried = [(Search(subject, subject.precise(long=True)), EVAL)]
    for search, mode in tried:
        if not subject.heavy or not mode.training:
            _require_none_ahead(search, mode, longest, generator)
    return f"lengths 2 to {longest}, eval and train mode"


def _require_none_ahead(
    search: Search, mode: Mode, time: int, generator: torch.Generator
) -> None:
    subject = search.subject
    few = 2 if subject.heavy else 8
    count = SPLITS if time <= SHORT else few
    positions = [s - 1 for s in splits_to_try(time, generator, count)]
    at_once = max(1, rows_at_once(subject.vocab_size, time) // 4)
    at_once = min(at_once, subject.rows or at_once)
    tokens = draw(subject.vocab_size, 1, time, generator, repeats=False)
    seed = int(torch.randint(1 << 30, (1,), generator=generator))

    def measure(part: list[int], row: int | None = None) -> Tensor:
        weights = torch.Generator().manual_seed(seed)
        grads = gradients_at(search, tokens, part, weights, mode, row)
        if grads is None:
            raise SkipCheck("no embedding of the tokens can be found")
        return grads

    def entry(part: list[int], row: int, later: int) -> Tensor:
        return measure(part, row)[row, later].reshape(1).double()

    for first in range(0, len(positions), at_once):
        part = positions[first : first + at_once]
        if not search.has_time(time, len(part), 1, mode, grad=True):
            return
        grads = measure(part).cpu()
        if not torch.isfinite(grads).all():
            raise SkipCheck("gradients are NaN or infinite: see check_finite")
        future = torch.arange(time) > torch.tensor(part).unsqueeze(1)
        ahead = grads.masked_fill(~future, 0.0)
        past = float(grads.masked_fill(future, 0.0).max())
        noise = past * torch.finfo(grads.dtype).eps
        size = float(ahead.max())
        if not size > FLOOR * noise:
            continue
        row, later = divmod(int(ahead.argmax()), time)
        if is_real(search.model, partial(entry, part, row, later), noise):
            raise AssertionError(
                f"the scores of position {part[row]} have a gradient by the "
                f"embedding of token {later}, at length {time}: {size:.2g}, "
                f"while the largest one from the past is {past:.2g}"
                f"{search.conditions(mode)}"
            )


def check_gradient_flow(subject: Subject) -> str:
    """Over several batches every trainable parameter gets a gradient.

    Why: a parameter that the optimiser never moves is dead weight: a layer
    that is never called, a detached branch, two factors that are both 0.
    How: train mode, cross-entropy of random targets, batch after batch, and
    with it the loss that the model returns; what has no gradient then is
    tried with zeros redrawn, and, if it has one there, once more after three
    steps. Mere rounding (a key's bias) and frozen parameters pass and are
    mentioned.
    Cost: one forward and backward where all is well, at most 16 more.
    Reports: state-spaces/s4 26, parameters that are used and yet get no
    gradient.
    """
    model = subject.build_module("a function has no parameters to see")
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    if frozen and len(frozen) == len([*model.parameters()]):
        raise SkipCheck("every parameter is frozen")
    sizes = _gradient_sizes(subject, model)
    without = [name for name, size in sizes.items() if size == 0]
    stuck = ""
    if without:
        copy = amplified(subject)
        if copy is not None:
            again = _gradient_sizes(subject, copy)
            without = [name for name in without if not again.get(name)]
        if not without:
            without = _stuck_at_zero(subject, model)
            stuck = ": factors that are both 0"
    if without:
        raise AssertionError(
            f"{len(without)} of {len(sizes)} trainable parameters never get "
            f"a gradient: {', '.join(without[:4])}{stuck}"
        )
    if not sizes:
        raise AssertionError("the model has no trainable parameter")
    largest = max(sizes.values())
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    unit = max(torch.finfo(dtype).eps for dtype in kinds)
    share = max(ROUNDING_SHARE, 16 * unit)
    faint = [n for n, s in sizes.items() if 0 < s < share * largest]
    notes = f"{len(sizes)} parameters"
    if faint:
        notes += (
            f"; only rounding reaches {len(faint)}: {', '.join(faint[:3])}"
        )
    if frozen:
        notes += f"; frozen: {', '.join(frozen[:3])}"
    return notes


def _backward_of_own_loss(
    subject: Subject, model: nn.Module, tokens: Tensor, targets: Tensor
) -> None:
    """Add the gradients of the loss that a model returns, if it does."""
    if subject.caller.target_name is None:
        return
    loss = None
    with suppress(AssertionError):  # the matter of check_loss
        _, loss = scores_and_loss(
            subject, model, tokens, targets, training=True, grad=True
        )
    if loss is not None and loss.requires_grad:
        with asked("in the backward pass of the loss"):
            loss.backward()


def _stuck_at_zero(subject: Subject, model: nn.Module) -> list[str]:
    """Return what still has no gradient after some steps, if it is all 0."""
    parameters, left = dict(model.named_parameters()), list[str]()
    for _ in range(3):
        with torch.no_grad():
            for p in parameters.values():
                if p.grad is not None:
                    p.sub_(p.grad.to_dense().sign(), alpha=1e-2)
        sizes = _gradient_sizes(subject, model)
        left = [name for name, size in sizes.items() if size == 0]
    return left if not any(parameters[n].any() for n in left) else []


def _gradient_sizes(subject: Subject, model: nn.Module) -> dict[str, float]:
    """Return the largest gradient entry that each parameter ever got."""
    generator, time = subject.generator(), subject.lengths.fit(32)
    batch = max(1, min(8, rows_at_once(subject.vocab_size, time) // 4))
    trainable = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
    sizes = dict.fromkeys(trainable, 0.0)
    for seed in range(16):
        tokens, targets = (
            subject.draw(batch, time, generator) for _ in range(2)
        )
        model.zero_grad()
        scores = subject.scores(
            model, tokens, training=True, grad=True, seed=seed
        )
        if subject.for_inference:
            raise SkipCheck("the model answers in inference mode")
        if not scores.requires_grad:
            raise AssertionError(
                "the scores carry no gradient in train mode: something "
                "detaches them"
            )
        if scores.dtype != torch.float64:
            scores = scores.float()
        with asked("in the backward pass in train mode"):
            cross_entropy(scores, targets).backward()
        if seed > 0:  # something has no gradient by the scores
            _backward_of_own_loss(subject, model, tokens, targets)
        for name, parameter in trainable.items():
            if parameter.grad is not None:
                # NaN is check_finite's matter
                grad = parameter.grad.to_dense().nan_to_num(nan=1.0)
                sizes[name] = max(sizes[name], float(grad.abs().max()))
        if all(sizes.values()):
            break
    return sizes
