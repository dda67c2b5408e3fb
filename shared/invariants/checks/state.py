"""State: calls leave no trace, and a saved model is the model."""

import copy
import itertools
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import asked, sentence
from ..model.building import Model
from ..model.randomness import random_states, seed_all
from ..model.subject import Subject
from ..model.tokens import others
from ..search.larger_weights import redraw_zeros
from ..search.tolerance import floor, gaps
from ..search.trial import EVAL, Mode

NOT_SAVED = "buffer (not saved)"
RANDOM = "the random state of "


def check_determinism(subject: Subject) -> str:
    """In eval mode the same input gives the same output, whatever came before.

    Why: dropout that never stops, and caches that outlive a sequence, make
    every evaluation another model's.
    How: one input again and again, with other seeds, after inputs of other
    sizes, with gradients; then batches that agree in one row or one column,
    which a fresh model gets in the opposite order.
    Cost: some 40 small forwards.
    Reports: pytorch/pytorch 26338, F.dropout goes on in eval mode.
    """
    generator = subject.generator()
    model = subject.build()
    tokens = subject.draw(2, 8, generator)
    call = partial(subject.scores, model, go_on=True)
    first = call(tokens, seed=1)
    seeds = itertools.count(2)

    def compare(after: str, grad: bool = False) -> None:
        scores = call(tokens, grad=grad, seed=next(seeds))
        _require_same(subject, scores.detach(), first, after)

    for count in range(2, 10):
        compare(f"at call {count}")
    compare("with gradients recorded", grad=True)
    for size in ((1, 1), (1, subject.block_size), (2, 8), (3, 5)):
        mixed = subject.draw(*size, generator)
        call(mixed)
        compare(f"after an input of shape {tuple(mixed.shape)}")
    batches = _alike(tokens, others(tokens, subject.vocab_size, generator))
    answers = [call(ids) for ids in batches]
    fresh = subject.build()
    for ids, answer in reversed([*zip(batches, answers, strict=True)]):
        what = "after batches that agree with theirs in a row or a column"
        scores = subject.scores(fresh, ids, go_on=True)
        _require_same(subject, scores, answer, what)
    return f"{19 + len(batches)} calls, with other inputs between them"


def _require_same(
    subject: Subject, scores: Tensor, first: Tensor, after: str
) -> None:
    """Require that the same tokens have the same scores as at first."""
    moved = gaps(scores, first)
    if float(moved.max()) > floor(first):
        subject.keeps_state = True  # for the checks to come
        position = int(moved.amax(0).argmax())
        raise AssertionError(
            f"the same tokens give other scores {after}: position "
            f"{position} moves by {float(moved.max()):.2g} at length "
            f"{moved.size(1)}"
        )


def _alike(tokens: Tensor, others: Tensor) -> list[Tensor]:
    """Return batches of which two in a row agree in one row or column."""
    others[:, 1:-1:2] = 0  # which may count as padding
    batches, rows = [], slice(None)
    for part in ((0,), (-1,), (rows, 0), (rows, -1)):
        mixed = others.clone()
        mixed[part] = tokens[part]
        batches += [tokens, mixed, others]
    return batches


def check_purity(subject: Subject) -> str:
    """A forward changes nothing outside itself.

    Why: an evaluation in the middle of training must not change it.
    How: the input, parameters, buffers, gradients, modes, random states and
    settings are compared. A buffer that is not saved may grow where scores
    stay. In train mode weights and buffers may change, and random numbers be
    drawn, but no generator seeded.
    Cost: six forwards and a copy of the weights.
    Reports: running statistics updated in eval mode; a manual_seed inside
    forward.
    """
    generator, model = subject.generator(), subject.build()
    for time in subject.fit(5, subject.block_size):
        rows = 1 if time * subject.vocab_size > 1 << 24 else 2
        tokens = subject.draw(subject.fit_rows(rows), time, generator)
        _require_pure(subject, model, tokens.to(subject.device), EVAL)
    tokens = subject.draw(subject.fit_rows(8), 5, generator)
    for training in (False, True):
        mode = Mode(training=training, grad=True)
        _require_pure(subject, model, tokens.to(subject.device), mode)
    return "input, weights, buffers, modes, random states, settings"


def _require_pure(
    subject: Subject, model: Model, tokens: Tensor, mode: Mode
) -> None:
    if isinstance(model, nn.Module):
        model.train(mode.training)
    if subject.keeps_state:
        subject.start_again(model)
    name = "train" if mode.training else "eval"
    where = f"a forward in {name} mode"
    # as the model takes them, so that what it does to them is seen
    given = subject.caller.arranged(tokens).clone()
    if subject.caller.time_first:
        given = given.mT
    what = f"on tokens of shape {tuple(tokens.shape)}, in {name} mode"
    with asked(what), torch.set_grad_enabled(mode.grad):
        before = _snapshot(model)
        subject.caller.call(model, given)
        after = _snapshot(model)
    if not torch.equal(given, tokens):
        at = (given != tokens).nonzero()[0].tolist()
        raise AssertionError(f"{where} changes its input, at {at}")
    may_change: tuple[str, ...] = (RANDOM,) if subject.noisy else ()
    if mode.training:
        may_change = (RANDOM, "buffer ", "parameter ")
    changed = [
        name
        for name in before | after
        if not name.startswith(may_change)
        and not _same(before.get(name), after.get(name))
    ]
    told = [name for name in changed if not name.startswith(NOT_SAVED)]
    more = ""
    if changed and not told:
        fresh = subject.scores(subject.build(), tokens)
        moved = gaps(subject.scores(model, tokens), fresh)
        if float(moved.max()) > floor(fresh):
            told, more = changed, ", and with it the scores"
    if told:
        what = "changes" if told[0] in before else "adds"
        raise AssertionError(f"{where} {what} {told[0]}{more}")
    if mode.training:
        seed_all(subject.seed + 1)
        subject.caller.call(model, given)
        for name, state in random_states().items():
            if state == after[RANDOM + name]:
                raise AssertionError(f"{where} seeds {name}")


def _snapshot(model: Model) -> dict[str, object]:
    """Return what a forward must not change, by what a failure calls it."""
    seen: dict[str, object] = {
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "whether operations must be deterministic": (
            torch.are_deterministic_algorithms_enabled()
        ),
    }
    seen |= {RANDOM + name: state for name, state in random_states().items()}
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
        seen[f"the mode of {name or 'the model'}"] = module.training
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
        model.train()
        redraw_zeros(model, generator)
        with torch.no_grad():  # in place, as an optimiser does
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.1)
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
def _scramble(model: nn.Module, generator: torch.Generator) -> None:
    """Replace all that a state dict should bring back."""
    saved = model.state_dict().keys()
    buffers = [b for name, b in model.named_buffers() if name in saved]
    for tensor in (*model.parameters(), *buffers):
        if is_lazy(tensor):
            continue
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise.to(tensor))
        else:
            tensor.zero_()
