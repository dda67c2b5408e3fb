"""State: calls leave no trace, and a saved model is the model."""

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import asked, sentence
from ..model.building import Model
from ..model.randomness import random_states
from ..model.subject import Subject
from ..model.tokens import draw
from ..search.tolerance import floor, gaps

NOT_SAVED = "buffer (not saved)"


def check_determinism(subject: Subject) -> str:
    """In eval mode the same input gives the same output, whatever came before.

    Why: dropout that never stops, and caches that outlive a sequence, make
    every evaluation another model's.
    How: one input again and again, with other seeds, after inputs of other
    sizes, and with gradients recorded.
    Cost: some 20 small forwards.
    Reports: pytorch/pytorch 26338, F.dropout goes on in eval mode.
    """
    generator = subject.generator()
    model = subject.build()
    time = subject.lengths.fit(8)
    tokens = draw(subject.vocab_size, 2, time, generator)
    first = subject.scores(model, tokens, seed=1)
    seeds = itertools.count(2)

    def compare(after: str, grad: bool = False) -> None:
        scores = subject.scores(
            model, tokens, grad=grad, seed=next(seeds)
        ).detach()
        moved = gaps(scores, first)
        if float(moved.max()) > floor(first):
            position = int(moved.amax(0).argmax())
            raise AssertionError(
                f"the same tokens give other scores {after}: position "
                f"{position} moves by {float(moved.max()):.2g} at length "
                f"{time}"
            )

    for call in range(2, 10):
        compare(f"at call {call}")
    compare("with gradients recorded", grad=True)
    sizes = ((1, 1), (1, subject.block_size), (2, time), (3, 5))
    for batch, other in ((b, subject.lengths.fit(t)) for b, t in sizes):
        mixed = draw(subject.vocab_size, batch, other, generator)
        subject.scores(model, mixed)
        compare(f"after an input of shape ({batch}, {other})")
    return "13 calls, with inputs of other sizes between them"


def check_purity(subject: Subject) -> str:
    """A forward in eval mode changes nothing outside itself.

    Why: an evaluation in the middle of training must not change the
    training: neither its weights, nor its data, nor its random numbers.
    How: the input, parameters, buffers, gradients, modes and the global
    random states are compared before and after. A buffer that is not saved
    may be filled or grow, as a table of positions does, where the scores
    stay a fresh model's.
    Cost: two forwards and a copy of the weights.
    Reports: running statistics updated in eval mode; a manual_seed inside
    forward.
    """
    generator = subject.generator()
    model = subject.build()
    for time in subject.fit(5, subject.block_size):
        tokens = draw(subject.vocab_size, 2, time, generator)
        if time * subject.vocab_size > 1 << 24:
            tokens = tokens[:1]
        _require_pure(subject, model, tokens.to(subject.device))
    return "input, weights, buffers, modes, random states"


def _require_pure(subject: Subject, model: Model, tokens: Tensor) -> None:
    if isinstance(model, nn.Module):
        model.eval()
    before = _snapshot(model)
    # as the model takes them, so that what it does to them is seen
    given = subject.caller.arranged(tokens).clone()
    if subject.caller.time_first:
        given = given.mT
    random, dtype = random_states(), torch.get_default_dtype()
    what = f"on tokens of shape {tuple(tokens.shape)}, in eval mode"
    with asked(what), torch.no_grad():
        subject.caller.call(model, given)
        grad = torch.is_grad_enabled()
    if grad:
        raise AssertionError("a forward switches gradients on")
    if torch.get_default_dtype() != dtype:
        raise AssertionError("a forward changes the default dtype")
    if not torch.equal(given, tokens):
        at = (given != tokens).nonzero()[0].tolist()
        raise AssertionError(f"a forward changes its input, at {at}")
    for name, state in random_states().items():
        if state != random[name] and not subject.noisy:
            raise AssertionError(
                f"a forward in eval mode changes the random state of {name}"
            )
    after = _snapshot(model)
    fresh = None
    for name in before | after:
        if _same(before.get(name), after.get(name)):
            continue
        what = f"changes {name}" if name in before else f"adds {name}"
        if name.startswith(NOT_SAVED):
            if fresh is None:
                fresh = subject.scores(subject.build(), tokens)
            moved = gaps(subject.scores(model, tokens), fresh)
            if float(moved.max()) <= floor(fresh):
                continue
            what += ", and with it the scores"
        raise AssertionError(f"a forward in eval mode {what}")


def _snapshot(model: Model) -> dict[str, object]:
    """Return what a forward must not change, by what a failure calls it."""
    seen: dict[str, object] = {}
    if not isinstance(model, nn.Module):
        return seen
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        seen[f"parameter {name}"] = parameter.detach().clone()
        seen[f"the gradient of {name}"] = (
            None if grad is None else grad.clone()
        )
        seen[f"requires_grad of {name}"] = parameter.requires_grad
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        kind = "buffer" if name in saved else NOT_SAVED
        seen[f"{kind} {name}"] = buffer.clone()
    for name, module in model.named_modules():
        seen[f"the mode of {name}"] = module.training
    return seen


def _same(old: object, new: object) -> bool:
    """Whether nothing has changed."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return type(old) is type(new) and old == new
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    return bool(((old == new) | ((old != old) & (new != new))).all())


def check_state_dict(subject: Subject) -> str:
    """A reloaded copy computes the same function.

    Why: what is no parameter and no saved buffer is lost in a checkpoint.
    How: a copy of the state goes into a model built with another seed, whose
    weights and saved buffers are scrambled first.
    Cost: two builds, four forwards, one copy of the weights.
    Reports: modules in a plain list, which PyTorch does not see.
    """
    model = subject.build_module("a function has no state to save")
    generator = subject.generator()
    time = subject.lengths.fit(8)
    tokens = draw(subject.vocab_size, 2, time, generator)
    expected = subject.scores(model, tokens)
    state = copy.deepcopy(model.state_dict())
    del model
    other = subject.build(seed=subject.seed + 1)
    assert isinstance(other, nn.Module)
    _scramble(other, generator)
    try:
        other.load_state_dict(state, strict=True)
    except Exception as error:
        raise AssertionError(
            f"a copy does not load the state: {sentence(error)}"
        ) from error
    moved = gaps(subject.scores(other, tokens), expected)
    if float(moved.max()) > floor(expected):
        raise AssertionError(
            f"a reloaded copy computes something else: scores differ by "
            f"{float(moved.max()):.2g}, so some state is not saved"
        )
    return f"{len(state)} tensors"


@torch.no_grad()
def _scramble(model: nn.Module, generator: torch.Generator) -> None:
    """Replace all that a state dict should bring back."""
    saved = model.state_dict().keys()
    tensors: list[Tensor] = list(model.parameters())
    tensors += [b for n, b in model.named_buffers() if n in saved]
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise.to(tensor))
        else:
            tensor.zero_()
