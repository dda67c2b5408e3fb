"""The guard of an evaluation: few calls, no copies, nothing changed."""

import random

import numpy as np
import pytest
import torch
from broken_models import BROKEN
from small_gpt import BLOCK, GPT, VOCAB
from torch import nn
from visible_models import VISIBLE, leaking, sound
from visible_models import VOCAB as FEW

from gpt_duet import guard


def texts(vocab=VOCAB, time=BLOCK, rows=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (rows, time), generator=generator)


class Counted(nn.Module):
    """Counts the calls of a model."""

    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, ids):
        self.calls += 1
        return self.model(ids)


BUILDS = {model.name: model.build for model in BROKEN}
LEAKS = ("no_mask", "mask_one_too_far", "mask_transposed", "mask_of_first_row")


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_raises_with_its_pair_and_its_line(name):
    model = Counted(BUILDS[name]().eval())
    with pytest.raises(AssertionError, match=r"sees token \d+: first") as one:
        guard(model, texts())
    assert "broken_models.py" in str(one.value) or "small_gpt" in str(
        one.value
    )
    assert model.calls <= 8


@pytest.mark.parametrize("training", [False, True])
def test_a_sound_model_passes_and_nothing_is_changed(training):
    model = Counted(GPT()).train(training)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    guard(model, texts())
    assert model.calls <= 8
    assert model.training == training
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2][1]).all()
    after = model.state_dict()
    assert all(before[name].equal(after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())


def test_a_leak_only_in_train_mode_is_seen_in_train_mode():
    model = BUILDS["mask_only_in_eval"]()
    guard(model.eval(), texts())
    with pytest.raises(AssertionError, match="sees token"):
        guard(model.train(), texts())


@pytest.mark.parametrize("name", VISIBLE)
def test_a_declaration_is_guarded(name):
    sees = VISIBLE[name][0]
    guard(sound(name)(), texts(FEW, 12), sees=sees)
    if name == "prefix":
        with pytest.raises(AssertionError, match=r"prefix\(5\) forbids"):
            guard(leaking(name)(), texts(FEW, 12), sees=sees)


def test_scores_are_found_or_named():
    def in_a_dict(ids):
        return {"loss": None, "logits": GPT()(ids)}

    guard(in_a_dict, texts())
    guard(lambda ids: (GPT()(ids), None), texts())
    guard(lambda ids: [GPT()(ids)], texts(), scores=lambda found: found[0])
    with pytest.raises(ValueError, match="give scores="):
        guard(lambda ids: None, texts())
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        guard(GPT(), texts()[0, :5])
