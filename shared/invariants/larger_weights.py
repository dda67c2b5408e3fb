"""Copies of a model whose weights are no longer a fresh model's.

Some faults do not show while weights are small or zero: a mask of -1e4 hides
the future until scores have grown beyond it, and a leak behind a projection
that starts at zero moves nothing at all.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .budget import Budget
from .copies import build, doubled, precise
from .errors import ModelRaised, during
from .model.building import hooked
from .model.reading import tensors_in
from .randomness import isolated
from .subject import Subject
from .variant import Copy, CopyFailed, Variant

MODERATE = 1.5  # size of what each matrix puts out, as if trained a little
EXTREME = (300.0, 100.0, 30.0, 10.0, 3.0)  # scores of two such: 1e5
LARGEST_FACTOR = 3000.0  # of a weight
LARGER = "larger weights"


def both(subject: Subject, budget: Budget, time: int = 0) -> Iterator[Variant]:
    """Yield the fresh model, then a copy with larger weights, if any.

    Both are read-only, and in float64 where the model can; time is the
    longest sequence that a check gives them.
    """
    yield precise(subject, budget, time)
    if (variant := larger(subject, budget)) is not None:
        yield variant


def larger(
    subject: Subject,
    budget: Budget,
    size: float = MODERATE,
    time: int = 0,
) -> Variant | None:
    """Return a copy with larger weights, or None where there is none.

    Zeros in trainable parameters are redrawn, and each matrix is scaled up
    until its outputs have a size (a root mean square).

    Args:
        subject: the model.
        budget: notes why there is no such copy.
        size: of activations.
        time: 0: a copy that is not to be changed; else one to compare pairs
            of equal shape in, as in `fresh`, to this length: it may fail.
    """
    why = ""
    if not subject.is_module:
        why = "a function has no weights to enlarge"
    elif not subject.builder.can_copy:
        why = "the model cannot be copied"
    if why:
        budget.give_up(LARGER, why)
        return None

    def make() -> Copy | None:
        try:
            return _enlarged(subject, budget, size, time)
        except CopyFailed as error:
            budget.give_up(LARGER, str(error))
            return None

    copy = make() if time else budget.keep(("larger", size), make)
    return None if copy is None else Variant(subject, budget, copy)


def _enlarged(
    subject: Subject, budget: Budget, size: float, time: int
) -> Copy:
    model = build(subject, budget)
    rough = subject.heavy and time > 0
    if not rough:
        model = doubled(subject, budget, model)
    assert isinstance(model, nn.Module)
    name = f"with {LARGER}"
    if size != MODERATE:
        name = f"with weights scaled up to activations of {size:.0f}"
    copy = Copy(model, name)
    variant = Variant(subject, budget, copy)
    generator = subject.generator()
    with isolated(subject.seed):
        redraw_zeros(model, generator)
        tokens = subject.draw(2, 8, generator)
        try:
            scale_outputs(variant, tokens, size)
        except ModelRaised:  # its weights are used in another way
            for p in _matrices(model):
                scale_alone(p, size)
        copy.may_fail = True
        variant.scores(tokens)
        if time > tokens.size(1):
            variant.scores(subject.draw(1, time, generator))
    copy.may_fail, copy.rough = time > 0, rough
    return copy


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
        noise = noise.to(parameter) / fan_in**0.5
        parameter.copy_(torch.where(zeros, noise, parameter))


@torch.no_grad()
def scale_outputs(variant: Variant, tokens: Tensor, size: float) -> None:
    """Scale each module's matrices up until its output has a size.

    One forward pass, module after module in the order of their calls (the
    idea of layer-sequential unit variance, Mishkin and Matas 2016); then
    what else is multiplied with, in the model itself or by a function.
    Tables of embeddings stay as they are, and so does what is tied to them.
    """
    model = variant.model
    left = {id(p): p for p in _matrices(model)}
    met: set[int] = set()
    running: set[int] = set()  # modules that are called again

    def scale(module: nn.Module, args: Any, kwargs: Any, answer: Any) -> Any:
        own = _own_parameters(module)
        matrices = [left[id(p)] for p in own if id(p) in left]
        if not matrices or id(module) in running:
            return None
        met.update(map(id, matrices))
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
            with during("called again with larger weights"):
                return module(*args, **kwargs)
        finally:
            running.discard(id(module))

    inner = (module for module in model.modules() if module is not model)
    with hooked(inner, scale), Multiplied() as multiplied:
        variant.scores(tokens)
    for key in (left.keys() & multiplied.seen) - met:
        scale_alone(left[key], size)


@torch.no_grad()
def scale_alone(matrix: nn.Parameter, size: float) -> None:
    """Scale a matrix up by its own numbers, as if its inputs were 1."""
    rms = float(matrix.double().square().sum() / len(matrix)) ** 0.5
    if rms > 0:
        matrix.mul_(min(max(size / rms, 1.0), LARGEST_FACTOR))


class Multiplied(TorchFunctionMode):
    """Notes what goes into products of matrices, by id; of a view its base."""

    NAMES = (
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm"),
        *("addmm", "baddbmm", "einsum", "conv1d"),
        "multi_head_attention_forward",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.NAMES:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor):
                    self.seen |= {id(x), id(x._base)}
        return func(*args, **(kwargs or {}))


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that are trained, but for tables of embeddings.

    All matrices, if no parameter is trainable: a frozen weight cannot be
    distinguished there from a constant of the architecture.
    """
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters()
    }
    found = [
        p
        for p in model.parameters()
        if p.ndim > 1 and p.is_floating_point() and id(p) not in tables
    ]
    return [p for p in found if p.requires_grad] or found


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's parameters, those behind a weight norm included."""
    own = list(module.parameters(recurse=False))
    parametrized = getattr(module, "parametrizations", None)
    if isinstance(parametrized, nn.Module):
        own += list(parametrized.parameters())
    return own
