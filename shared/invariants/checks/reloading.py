"""A saved model is the model."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import sentence
from ..model.subject import Subject
from ..search.larger_weights import redraw_zeros
from ..search.tolerance import floor, gaps


def check_state_dict(subject: Subject) -> str:
    """A reloaded copy computes the same function.

    Why: what is no parameter and no saved buffer is lost in a checkpoint;
    and what was computed from weights is wrong when others are loaded.
    How: a model is evaluated and trained a little; a copy of its state goes
    into one with scrambled weights, and again after more training.
    Cost: two builds, four forwards, two copies of the weights.
    Reports: modules in a plain list, which PyTorch does not see.
    """
    subject.require_no_state()
    model = subject.build_module("a function has no state to save")
    generator = subject.generator()
    tokens = subject.draw(2, 8, generator)
    other = subject.build(seed=subject.seed + 1)
    assert isinstance(other, nn.Module)
    _scramble(other, generator)
    subject.scores(model, tokens)
    old = "what was computed from other weights is still in use"
    for times, why in (
        ("", f"some state is not saved, or {old}"),
        (", after it was evaluated", old),
    ):
        _train_a_little(model, generator)
        expected = subject.scores(model, tokens)
        state = copy.deepcopy(model.state_dict())
        try:
            other.load_state_dict(state)
        except Exception as error:
            raise AssertionError(
                f"a copy does not load the state: {sentence(error)}"
            ) from error
        scores = subject.scores(other, tokens)
        size = float(gaps(scores.nan_to_num(), expected.nan_to_num()).max())
        if size > floor(expected):
            raise AssertionError(
                f"a reloaded copy computes something else{times}: scores "
                f"differ by {size:.2g}, so {why}"
            )
    return f"{len(state)} tensors, loaded before and after an evaluation"


@torch.no_grad()
def _train_a_little(model: nn.Module, generator: torch.Generator) -> None:
    """Change trainable weights in place, as an optimiser does."""
    model.train()
    redraw_zeros(model, generator)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.mul_(1.1)


def _saved(model: nn.Module) -> list[Tensor]:
    """Return all that a state dict should bring back."""
    saved = model.state_dict().keys()
    tensors: list[Tensor] = list(model.parameters())
    tensors += [b for n, b in model.named_buffers() if n in saved]
    return [tensor for tensor in tensors if not is_lazy(tensor)]


@torch.no_grad()
def _scramble(model: nn.Module, generator: torch.Generator) -> None:
    """Replace all that a state dict should bring back."""
    for tensor in _saved(model):
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise.to(tensor))
        else:
            tensor.zero_()
