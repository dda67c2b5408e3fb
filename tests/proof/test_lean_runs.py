"""A lean run keeps nothing for a backward pass, but finds the same codes."""

import weakref
from functools import partial

import pytest
import torch

from gpt_duet.proof.engine import follow
from gpt_duet.proof.shadows import Shadows
from gpt_duet.running.errors import ModelRaised

TOKENS = torch.tensor([[3, 1, 2, 0]])


def running(values):
    return values.exp().cumsum(1).tanh()


def by_autograd(values):
    loss = running(values).square().sum()
    return torch.autograd.grad(loss, values)[0]


def by_torch_func(values):
    return torch.func.grad(lambda v: running(v).square().sum())(values)


def caught(values):
    try:
        return by_autograd(values)
    except RuntimeError:
        return values.detach()


def refused(values):
    raise ModelRaised("too long")


def run_of(function):
    def run(tokens, targets):
        run.calls += 1
        values = tokens.double().unsqueeze(2).requires_grad_()
        try:
            return function(values)
        except RuntimeError as error:
            raise ModelRaised(str(error)) from error

    run.calls = 0
    run.reset = lambda: None
    run.shadows = partial(Shadows, [])
    return run


@pytest.mark.parametrize(
    ("function", "calls"),
    [(running, 1), (by_autograd, 2), (by_torch_func, 2), (caught, 2)],
)
def test_a_lean_run_finds_the_same_codes(function, calls):
    full, lean = run_of(function), run_of(function)
    found = follow(lean, TOKENS, lean=True)
    assert found.reached.equal(follow(full, TOKENS).reached)
    assert lean.calls == calls


def test_a_lean_run_raises_what_the_model_raises():
    with pytest.raises(ModelRaised, match="too long"):
        follow(run_of(refused), TOKENS, lean=True)


@pytest.mark.parametrize("lean", [True, False])
def test_a_lean_run_frees_numbers_of_the_backward_pass(lean):
    left = []

    def keeps_a_sine(values):
        kept = values.exp()
        alive = weakref.ref(kept.untyped_storage())
        answer = kept.sin()
        del kept
        left.append(alive() is not None)
        return answer

    follow(run_of(keeps_a_sine), TOKENS, lean=lean)
    assert left[0] != lean
