"""Copies of a model whose weights are no longer a fresh model's.

Some faults do not show while weights are small or zero: a mask of -1e4 hides
the future until scores have grown beyond it, and a leak behind a projection
that starts at zero moves nothing at all.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from .cases import ENLARGED, LARGER, Case
from .model.subclasses import is_plain
from .randomness import isolated
from .ranks import current, local
from .subject import Subject
from .variant import Copy, CopyFailed, Variant, build, doubled, precise

LARGEST_FACTOR = 3000.0  # of a weight


def both(subject: Subject, time: int = 0) -> Iterator[Variant]:
    """Yield the fresh model, then a copy with larger weights, if any.

    Both are read-only, and in float64 where the model can; time is the
    longest sequence that a check gives them.
    """
    yield precise(subject, time)
    if (variant := larger(subject)) is not None:
        yield variant


def larger(
    subject: Subject, case: Case = ENLARGED[0], time: int = 0
) -> Variant | None:
    """Return a copy with larger weights, or None where there is none.

    Zeros in trainable parameters are redrawn, and each matrix is scaled up
    until its products have a size (a root mean square).

    Args:
        subject: the model; its budget notes why there is no such copy.
        case: its size is that of products.
        time: 0: a copy that is not to be changed; else a new one to compare
            pairs of equal shape in, to this length: it may fail.
    """
    why = ""
    if not subject.is_module:
        why = "a function has no weights to enlarge"
    elif not subject.builder.can_copy:
        why = "the model cannot be copied"
    if why:
        subject.budget.give_up(LARGER, why)
        return None
    key = LARGER, case.size
    copy = None if time else subject.kept.get(key)
    try:
        copy = copy or _enlarged(subject, case, time)
    except CopyFailed as error:
        subject.budget.give_up(LARGER, str(error))
        return None
    if not time:
        subject.kept[key] = copy
    return Variant(
        subject, copy, replace(case, dtype=None) if copy.rough else case
    )


def _enlarged(subject: Subject, case: Case, time: int) -> Copy:
    model = build(subject)
    rough = subject.heavy and time > 0
    if not rough:
        model = doubled(subject, model, case.visible is not None)
    assert isinstance(model, nn.Module)
    copy = Copy(model, may_fail=True)
    variant = Variant(subject, copy, Case(size=case.size))
    generator = subject.generator()
    with isolated(subject.seed):
        redraw_zeros(model, generator)
        scale_up(model, case.size)
        variant.scores(subject.draw(2, 8, generator))
        if time > 8:
            variant.scores(subject.draw(1, time, generator))
    copy.may_fail, copy.rough = time > 0, rough
    return copy


@torch.no_grad()
def redraw_zeros(model: nn.Module, generator: torch.Generator) -> None:
    """Replace each 0 in trainable parameters by a random number.

    Parameters with hooks on their gradients keep their zeros: those may be
    how the model keeps a structure.
    """
    for index, parameter in enumerate(model.parameters()):
        hooks = getattr(parameter, "_backward_hooks", None)
        plain = is_plain(type(local(parameter)))
        if not parameter.requires_grad or hooks or not plain:
            continue
        parameter = local(parameter)
        if current() is not None:  # what other ranks draw depends on zeros
            generator = torch.Generator().manual_seed(index)
        zeros = parameter == 0
        if not zeros.any():
            continue
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        noise = torch.randn(parameter.shape, generator=generator)
        noise = noise.to(parameter) / fan_in**0.5
        parameter.copy_(torch.where(zeros, noise, parameter))


@torch.no_grad()
def scale_up(model: nn.Module, size: float) -> None:
    """Scale each matrix up by its own numbers, as if its inputs were 1.

    Tables of embeddings stay as they are, and so does what is tied to them.
    Where no parameter is trained all matrices are scaled: a frozen weight
    cannot be distinguished there from a constant of the architecture.
    """
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters()
    }
    matrices = [
        p
        for p in model.parameters()
        if p.ndim > 1
        and p.is_floating_point()
        and id(p) not in tables
        and is_plain(type(local(p)))
    ]
    for p in map(local, [p for p in matrices if p.requires_grad] or matrices):
        rms = float(p.double().square().sum() / len(p)) ** 0.5
        if rms > 0:
            p.mul_(min(max(size / rms, 1.0), LARGEST_FACTOR))
