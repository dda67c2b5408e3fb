"""A reloaded model is the same model."""

import copy

import torch
from torch import Tensor, nn

from ...running.errors import ModelRaised, sentence
from ...running.operations import is_plain
from ...running.ranks import local
from ...running.rounding import floor, gaps
from ...running.variant import Copy, Variant, build, changeable, redraw_zeros
from ...running.ways import TRAIN
from ..check import Subject, check

FORWARDS = 3  # calls in train mode before the last reload


@check(needs="weights", weight=1.5)
def check_state_dict(subject: Subject) -> str:
    """A reloaded copy computes the same function.

    Why: a tensor that is neither a parameter nor a saved buffer is lost in a
    checkpoint. A tensor that was computed from weights is wrong once other
    weights are loaded.
    How: a model is evaluated and trained a little. A copy of its state is then
    loaded into a model with scrambled weights. This is repeated after more
    training, and after forwards in train mode, which may change buffers.
    If it fails: a tensor that is neither a parameter nor a saved buffer is
    lost. Register it. "Still in use": drop tensors that were computed from
    weights (merged adapters, tables) in train() and when other weights are
    loaded.
    Reports: modules in a plain list, which PyTorch does not see.
    """
    subject.require_no_state()
    variant = changeable(subject, "a function has no state to save")
    model = variant.model
    generator = subject.generator()
    tokens = subject.draw(2, 8, generator)
    other = build(subject, seed=subject.seed + 1)
    assert isinstance(other, nn.Module)
    _scramble(other, generator)
    reloaded = Variant(subject, Copy(other))
    variant.scores(tokens)
    old = "what was computed from other weights is still in use"
    for times, why in (
        ("", f"some state is not saved, or {old}"),
        (", after it was evaluated", old),
    ):
        # pass True, because some models override train() without a default
        model.train(True)
        redraw_zeros(model, generator)
        with torch.no_grad():  # in place, as an optimiser changes weights
            for parameter in model.parameters():
                own = local(parameter)
                if parameter.requires_grad and is_plain(type(own)):
                    own.mul_(1.1)
        expected = variant.scores(tokens)
        variant.start_again()  # undo changes of buffers by the call
        _require_same(reloaded, model, tokens, expected, times, why)
    saved = model.state_dict().keys()
    if moved := _train(variant, tokens):
        lost = [name for name in moved if name not in saved]
        why = f"{', '.join(lost[:3]) or 'some state'} is not saved"
        expected = variant.scores(tokens)
        when = f", after {FORWARDS} forwards in train mode"
        _require_same(reloaded, model, tokens, expected, when, why)
    return f"{len(saved)} tensors, loaded before and after an evaluation"


def _require_same(
    reloaded: Variant,
    model: nn.Module,
    tokens: Tensor,
    expected: Tensor,
    when: str,
    why: str,
) -> None:
    """Load a model's state into another model, and require equal scores."""
    state = copy.deepcopy(model.state_dict())
    reloaded.start_again()
    try:
        reloaded.model.load_state_dict(state)
    except Exception as error:
        raise AssertionError(
            f"a copy does not load the state: {sentence(error)}"
        ) from error
    # from now on the loaded state is the copy's first state
    reloaded.copy.built = None
    scores = reloaded.scores(tokens)
    size = float(gaps(scores.nan_to_num(), expected.nan_to_num()).max())
    if size > floor(expected):
        raise AssertionError(
            f"a reloaded copy computes something else{when}: scores "
            f"differ by {size:.2g}, so {why}"
        )


def _train(variant: Variant, tokens: Tensor) -> list[str]:
    """Call a model in train mode; return the buffers that it changes."""
    buffers = dict(variant.model.named_buffers())
    before = {name: b.clone() for name, b in buffers.items()}
    training, seed = variant.run_as(TRAIN), variant.subject.seed
    try:
        for count in range(FORWARDS):
            training.answer(tokens, go_on=True, seed=seed + count)
    except ModelRaised:  # a model may require targets in train mode
        return []
    return [
        name
        for name, b in variant.model.named_buffers()
        if name not in before or not torch.equal(b, before[name])
    ]


@torch.no_grad()
def _scramble(model: nn.Module, generator: torch.Generator) -> None:
    """Replace all values that a state dict should restore."""
    saved = model.state_dict().keys()
    buffers = [b for name, b in model.named_buffers() if name in saved]
    tensors = [*map(local, (*model.parameters(), *buffers))]
    for tensor in [t for t in tensors if is_plain(type(t))]:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise.to(tensor))
        else:
            tensor.zero_()
