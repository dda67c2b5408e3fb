"""Every broken model is broken, every correct one is not: measured."""

from collections import Counter

import pytest
from broken_models import BROKEN, SLOW, as_parameters
from correct_models import CORRECT
from measurements import MEASUREMENTS
from small_gpt import GPT

# no function of ours is called, so there are no shapes to check
pytestmark = pytest.mark.unhooked

ONLY = [model for model in BROKEN if model.only]


def found_in(model, checks):
    """What the measurements of these properties find in a layer or two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT, "layers", 1 + getattr(model, "deep", False))
        found = {check: MEASUREMENTS[check](model) for check in sorted(checks)}
    return {check: words for check, words in found.items() if words}


@pytest.mark.parametrize("model", as_parameters(BROKEN))
def test_broken_model_violates_its_property(model):
    assert found_in(model, [model.check]), model.sentence


@pytest.mark.slow
@pytest.mark.parametrize("model", as_parameters(ONLY))
def test_nothing_else_is_broken(model):
    assert not found_in(model, MEASUREMENTS.keys() - {model.check, SLOW})


@pytest.mark.slow
@pytest.mark.parametrize("model", as_parameters(CORRECT))
def test_correct_model_holds_every_property(model):
    assert not found_in(model, MEASUREMENTS.keys() - {SLOW, *model.loosely})


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", as_parameters(c for c in CORRECT if c.vocab_size < 10_000)
)
def test_correct_model_learns_what_can_be_learnt(model):
    assert not found_in(model, {SLOW} - {*model.loosely})


def test_there_are_enough_and_each_is_named_and_explained():
    assert len(BROKEN) >= 130
    assert len(CORRECT) >= 65
    for models in (BROKEN, CORRECT):
        assert max(Counter(model.name for model in models).values()) == 1
    assert len({model.sentence for model in BROKEN}) == len(BROKEN)
    sentences = [m.sentence for m in BROKEN] + [m.note for m in CORRECT]
    assert all(sentence.endswith(".") for sentence in sentences)


def test_builds_are_fresh():
    for model in (*BROKEN, *CORRECT):
        assert model.build() is not model.build(), model.name
