"""Masks, positions, caches and targets are made on the tokens' device.

A fake device computes on the CPU, but refuses to combine tensors of two
devices. If the machine has an accelerator, the tests use it as well.
"""

from functools import partial

import pytest
import torch

from gpt_duet import mingpt_style
from gpt_duet.benchmarks.measure import training_step
from gpt_duet.benchmarks.models import Candidate
from gpt_duet.benchmarks.plan import Tokens, make_plan
from gpt_duet.config import GPTConfig
from gpt_duet.generation import generate, stream_tokens
from gpt_duet.invariants import check_model
from gpt_duet.invariants.checks.dtype.other_device import NAME, elsewhere

CONFIG = GPTConfig(11, 8, n_layer=2, n_head=2, n_embd=8, dropout=0.0)


ACCELERATOR = pytest.param("accelerator", marks=pytest.mark.gpu)


@pytest.fixture
def accelerator():
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        pytest.skip("this machine has no accelerator")
    return str(found)


@pytest.fixture(params=["stand-in", ACCELERATOR])
def device(request):
    if request.param == "accelerator":
        yield request.getfixturevalue("accelerator")
    else:
        with elsewhere():
            yield NAME


@pytest.fixture
def moved(style, device):
    """Return a model on the CPU, and a copy of it on the device."""
    torch.manual_seed(0)
    here = style.build_model(CONFIG).eval()
    there = style.build_model(CONFIG).eval()
    there.load_state_dict(here.state_dict())
    return here, there.to(device)


def back(tensor):
    return getattr(tensor, "here", tensor).detach().cpu()


IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
RUNS = {
    "log_probs": lambda m, ids: m.log_probs(ids),
    "next_log_probs": lambda m, ids: m.next_log_probs(ids),
    "the window slides": lambda m, ids: generate(m, ids, 6),
    "rows of two lengths": lambda m, ids: torch.stack(
        [*stream_tokens(m, [[1], [2, 3, 4]], 3)]
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_model_computes_on_its_device(moved, device, run):
    here, there = moved
    expected, found = RUNS[run](here, IDS), RUNS[run](there, IDS.to(device))
    assert found.device.type == torch.device(device).type
    torch.testing.assert_close(back(found), expected, atol=1e-4, rtol=1e-4)


def test_tokens_are_drawn_on_the_models_device(moved, device):
    _, there = moved
    how = {"temperature": 1.0, "top_k": 5, "top_p": 0.9}
    found = back(generate(there, IDS.to(device), 2, **how))
    assert (found[:, :5] == IDS).all()
    assert found.max() < CONFIG.vocab_size


def test_an_accelerator_takes_targets_and_a_step_of_training(moved, device):
    losses = []
    for model, where in zip(moved, ("cpu", device), strict=True):
        tokens = Tokens(make_plan("gpt-nano", sizes={"vocab_size": 11}), 2, 5)
        tokens.ids = tokens.ids.to(where)
        tokens.targets = tokens.targets.to(where)
        row = Candidate("a", model, model.log_probs, "log-probs")
        step = training_step(row, tokens)
        losses.append([step(), step()])
        if isinstance(model, mingpt_style.GPT):
            losses[-1].append(
                float(back(model(tokens.ids, tokens.targets)[1]))
            )
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.gpu
def test_the_checks_hold_on_an_accelerator(style, accelerator):
    report = check_model(
        partial(style.build_model, CONFIG), device=accelerator, budget=30
    )
    assert report.ok, str(report)
