"""Copies of a model whose weights are no longer a fresh model's.

Some faults do not show while weights are small or zero: a mask of -1e4 hides
the future until scores have grown beyond it, and a leak behind a projection
that starts at zero moves nothing at all.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelRaised
from ..model.randomness import isolated
from ..model.reading import tensors_in
from ..model.subject import Subject
from ..model.tokens import draw

MODERATE = 1.5  # size of what each matrix puts out, as if trained a little
EXTREME = (300.0, 100.0, 30.0, 10.0, 3.0)  # scores of two such: 1e5
LARGEST_FACTOR = 3000.0  # of a weight


def amplified(
    subject: Subject, size: float = MODERATE, precise: bool = True
) -> nn.Module | None:
    """Return a copy with larger weights, not to be changed, or None.

    Zeros in trainable parameters are redrawn, and each matrix is scaled up
    until its outputs are of a size. None where scores are then not finite,
    or there is no module to change.

    Args:
        subject: what is copied.
        size: root mean square of what each matrix puts out.
        precise: whether in float64, where the model can.
    """
    if size != MODERATE or not precise:
        return _amplified(subject, size, precise)
    return subject.shared(
        "larger weights", lambda: _amplified(subject, size, precise)
    )


def _amplified(
    subject: Subject, size: float, precise: bool
) -> nn.Module | None:
    model = subject.build()
    if not isinstance(model, nn.Module) or not subject.builder.can_copy:
        return None
    if precise:
        model = subject.doubled(model)
    assert isinstance(model, nn.Module)
    generator = subject.generator()
    with isolated(subject.seed):
        redraw_zeros(model, generator)
        time = subject.lengths.fit(8)
        tokens = draw(subject.vocab_size, 2, time, generator)
        try:
            scale_outputs(subject, model, tokens, size)
        except ModelRaised:  # its weights are used in another way
            scale_matrices(model, size)
        try:
            scores = subject.scores(model, tokens)
        except ModelRaised:
            return None
    return model if bool(torch.isfinite(scores).all()) else None


@torch.no_grad()
def redraw_zeros(model: nn.Module, generator: torch.Generator) -> None:
    """Replace each 0 in trainable parameters by a random number.

    Parameters with hooks on their gradients keep their zeros: those may be
    how the model keeps a structure.
    """
    for parameter in model.parameters():
        hooks = getattr(parameter, "_backward_hooks", None)
        if not parameter.requires_grad or hooks:
            continue
        zeros = parameter == 0
        if not zeros.any():
            continue
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        noise = torch.randn(parameter.shape, generator=generator)
        noise = noise.to(parameter) / max(fan_in, 1) ** 0.5
        parameter.copy_(torch.where(zeros, noise, parameter))


@torch.no_grad()
def scale_outputs(
    subject: Subject, model: nn.Module, tokens: Tensor, size: float
) -> None:
    """Scale each module's matrices up until its output has a size.

    One forward pass, module after module in the order of their calls (the
    idea of layer-sequential unit variance, Mishkin and Matas 2016). Tables
    of embeddings stay as they are, and so does what is tied to them.
    """
    tables = _tables(model)
    running: set[int] = set()  # modules that are called again

    def scale(
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        answer: Any,
    ) -> Any:
        matrices = [
            p
            for p in _own_parameters(module)
            if p.ndim > 1 and p.requires_grad and id(p) not in tables
        ]
        if not matrices or id(module) in running:
            return None
        output = next((t for _, t in tensors_in(answer)), None)
        if output is None or not output.is_floating_point():
            return None
        rms = output.double().square().mean().sqrt().item()
        factor = min(size / rms, LARGEST_FACTOR) if rms > 0 else 1.0
        if not factor > 1:  # NaN too
            return None
        for p in matrices:
            p.mul_(factor)
        running.add(id(module))
        try:
            return module(*args, **kwargs)
        finally:
            running.discard(id(module))

    handles = [
        module.register_forward_hook(scale, with_kwargs=True)
        for module in model.modules()
        if module is not model
    ]
    try:
        subject.scores(model, tokens)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def scale_matrices(model: nn.Module, size: float) -> None:
    """Scale each matrix up by its own numbers, as if its inputs were 1."""
    tables = _tables(model)
    for p in model.parameters():
        if p.ndim > 1 and p.requires_grad and id(p) not in tables:
            rms = float(p.double().square().mean() * p[0].numel()) ** 0.5
            if rms > 0:
                p.mul_(min(max(size / rms, 1.0), LARGEST_FACTOR))


def _tables(model: nn.Module) -> set[int]:
    """Return the ids of what embeddings look up."""
    return {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters(recurse=False)
    }


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's parameters, those behind a weight norm included."""
    own = list(module.parameters(recurse=False))
    parametrized = getattr(module, "parametrizations", None)
    if isinstance(parametrized, nn.Module):
        own += list(parametrized.parameters())
    return own
