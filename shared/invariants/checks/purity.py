"""A forward leaves no trace."""

import torch
from torch import Tensor, nn

from ...running.context import (
    PYTHON,
    during,
    only_type_checkers_draw,
    random_states,
    seed_all,
)
from ...running.model.building import Model
from ...running.operations import parts_of
from ...running.ranks import bits, local
from ...running.rounding import differ
from ...running.variant import Variant, own
from ...running.ways import EVAL, TRAIN, WITH_GRADIENTS
from ..check import Subject, check

NOT_SAVED = "buffer (not saved)"
RANDOM = "the random state of "
ABSENT = "absent"


@check(needs="modes and no buffers", weight=1.5)
def check_purity(subject: Subject) -> str:
    """A forward changes nothing outside itself.

    Why: an evaluation in the middle of training must not change it.
    How: the input, parameters, buffers, gradients, modes, random states and
    settings are compared before and after a forward. A buffer that is not
    saved may change if scores stay the same. In train mode weights and buffers
    may change, and the model may draw random numbers, but not seed a
    generator.
    If it fails: the message names the first change. In eval mode a forward
    must not change its input, parameters, buffers, modes or global settings
    (random states, recording of gradients, the default dtype). In train mode
    weights and buffers may change.
    Reports: running statistics in eval mode; a manual_seed in forward.
    """
    generator, variant = subject.generator(), own(subject)
    for time in subject.fit(5, subject.block_size):
        rows = 1 if time * subject.vocab_size > 1 << 24 else 2
        tokens = subject.draw(subject.fit_rows(rows), time, generator)
        _require_pure(variant, tokens.to(subject.device))
    tokens = subject.draw(subject.fit_rows(8), 5, generator)
    for case in (WITH_GRADIENTS, TRAIN):
        _require_pure(variant.run_as(case), tokens.to(subject.device))
    return "input, weights, buffers, modes, random states, settings"


def _require_pure(variant: Variant, tokens: Tensor) -> None:
    subject, model, case = variant.subject, variant.model, variant.case
    variant.set_mode()
    variant.start_again()
    where = f"a forward {case.mode}"
    # the very ids that the model gets, to see whether it changes them
    given = tokens.clone()
    if subject.caller.time_first:
        given = given.mT.contiguous().mT
    what = f"on tokens of shape {tuple(tokens.shape)}, {case.mode}"
    with during(what), torch.set_grad_enabled(case.grad):
        # just before the call, because type checkers draw random numbers too
        before = _snapshot(model) | _random()
        subject.caller.call(model, given)
        after = _random() | _snapshot(model)
    if not torch.equal(given, tokens):
        at = (given != tokens).nonzero()[0].tolist()
        raise AssertionError(f"{where} changes its input, at {at}")
    may_change = (RANDOM,) * subject.noisy
    if case.training:
        may_change = (RANDOM, "buffer ", "parameter ")
    changed = [
        name
        for name in before | after
        if not name.startswith(may_change)
        and before.get(name, ABSENT) != after.get(name, ABSENT)
    ]
    if RANDOM + PYTHON in changed and only_type_checkers_draw(
        lambda: subject.caller.call(model, given)
    ):
        changed.remove(RANDOM + PYTHON)
    faults = [name for name in changed if not name.startswith(NOT_SAVED)]
    more = ""
    if changed and not faults:
        first = own(subject).scores(tokens)
        if differ(variant.run_as(EVAL).scores(tokens), first):
            faults, more = changed, ", and with it the scores"
    if faults:
        what = "changes" if faults[0] in before else "adds"
        raise AssertionError(f"{where} {what} {faults[0]}{more}")
    if case.training:
        seed_all(subject.seed + 1)
        subject.caller.call(model, given)
        for name, state in random_states().items():
            if state == after[RANDOM + name]:
                raise AssertionError(f"{where} seeds {name}")


def _random() -> dict[str, object]:
    """Return the states of generators, by their names in a message."""
    return {RANDOM + name: state for name, state in random_states().items()}


def _snapshot(model: Model) -> dict[str, object]:
    """Return the state that a forward must not change, by name in messages."""
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
    if not isinstance(model, nn.Module):
        return seen
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        seen[f"parameter {name}"] = _contents(parameter)
        seen[f"the gradient of {name}"] = (
            None if grad is None else _contents(grad)
        )
        seen[f"requires_grad of {name}"] = parameter.requires_grad
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        kind = "buffer" if name in saved else NOT_SAVED
        seen[f"{kind} {name}"] = _contents(buffer)
    for name, module in model.named_modules():
        seen[f"the mode of {name or 'the model'}"] = module.training
    return seen


def _contents(tensor: Tensor) -> list[object]:
    """Return a tensor's shape, dtype and bits; equal NaNs have equal bits."""
    parts = [p.detach().to_dense().cpu() for p in parts_of(local(tensor))]
    return [(part.shape, part.dtype, bits(part)) for part in parts]
