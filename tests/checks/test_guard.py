"""The guard of an evaluation makes few calls, and changes nothing."""

import random

import numpy as np
import pytest
import torch
from broken_models import BROKEN
from small_gpt import BLOCK, GPT, VOCAB
from torch import nn
from visible_models import VISIBLE, leaking, of, sound
from visible_models import VOCAB as FEW

from gpt_duet import guard
from gpt_duet.visibility import window


def texts(vocab=VOCAB, time=BLOCK, rows=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (rows, time), generator=generator)


class Counted(nn.Module):
    """A wrapper that counts the calls of a model."""

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


@pytest.mark.unhooked  # not with --check-shapes, which draws random numbers
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


class Next(nn.Module):
    """A model that adds a value of the next token to each score."""

    def __init__(self, model=GPT):
        super().__init__()
        self.model = model()

    def forward(self, ids):
        ahead = self.model.wte(ids)[..., :1]
        return self.model(ids) + torch.cat([ahead[:, 1:], ahead[:, :1]], 1)


@pytest.mark.parametrize("token", [0, 1, 5])
def test_a_leak_shows_in_texts_of_one_id(token):
    with pytest.raises(AssertionError, match="sees token"):
        guard(Next(), torch.full((2, BLOCK), token))


@pytest.mark.parametrize(
    "turned",
    [
        lambda scores: scores.transpose(0, 1),
        lambda scores: scores.flatten(0, 1),
        lambda scores: {"aux": torch.zeros(4 * BLOCK, 3), "logits": scores},
        lambda scores: {"aux": torch.zeros(4 * BLOCK, 3), "mine": scores},
    ],
)
def test_scores_of_any_form_are_read(turned):
    sound, leaking = GPT(), Next()
    guard(lambda ids: turned(sound(ids)), texts())
    with pytest.raises(AssertionError, match="sees token"):
        guard(lambda ids: turned(leaking(ids)), texts())


class Counting(nn.Module):
    """A model whose scores grow with each call."""

    def __init__(self):
        super().__init__()
        self.model, self.calls = GPT(), 0

    def forward(self, ids):
        self.calls += 1
        return self.model(ids) * self.calls


class Noisy(GPT):
    """A model that draws random numbers from a private generator."""

    def forward(self, ids):
        scores, self.own = super().forward(ids), torch.Generator()
        self.seed = getattr(self, "seed", 0) + 1
        noise = torch.randn(
            scores.shape, generator=self.own.manual_seed(self.seed)
        )
        return scores + noise


class OneRowOfNaN(Next):
    """The scores of one row are NaN; the other rows leak."""

    def forward(self, ids):
        scores = super().forward(ids)
        return torch.cat([scores[:1] * float("nan"), scores[1:]])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Counting, "keeps a state"),
        (Noisy, "its own random generator"),
        (OneRowOfNaN, "25% of the positions are NaN"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(model, words):
    with pytest.raises(ValueError, match=words):
        guard(model(), texts())


@pytest.mark.unhooked  # --check-shapes would refuse the wrong values
def test_a_mistake_with_the_guard_is_one_line():
    model = GPT()
    for given, how, words in (
        (texts().tolist(), {}, "got list"),
        (texts(), {"sees": "window"}, "sees must be a predicate"),
        (texts(), {"scores": lambda found: found.argmax(-1)}, "give scores="),
        (texts(), {"scores": lambda found: found[..., 0]}, "give scores="),
    ):
        with pytest.raises(ValueError, match=words) as error:
            guard(model, given, **how)
        assert "\n" not in str(error.value)
    guard(model, texts(), sees=None)


def test_positions_with_most_forbidden_pairs_are_tried():
    """One model's window is too wide; in the other model, an image sees the
    next image."""
    for name, more in (("window", window(5)), ("images", None)):
        sees = VISIBLE[name][0]
        model = leaking(name)() if more is None else of(more)()
        with pytest.raises(AssertionError, match="forbids"):
            guard(model, texts(FEW, 12), sees=sees)
