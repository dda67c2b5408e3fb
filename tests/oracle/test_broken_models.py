"""Measurements confirm which models are broken and which are correct."""

from collections import Counter

import pytest
import torch
from broken_models import BROKEN, SLOW, as_parameters
from correct_models import CORRECT
from measurements import MEASUREMENTS
from small_gpt import GPT

# no code of the kit runs here, so a run with shape checks would add nothing
pytestmark = pytest.mark.unhooked


def measure(model, checks):
    """Measure properties of a model with one layer, or two if it is deep."""
    checks -= {f"check_{name}" for name in model.loosely.split()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT, "layers", 1 + model.deep)
        for check in sorted(checks):
            # restore autograd's switch, even if a model changes it
            with torch.enable_grad():
                MEASUREMENTS[check](model)


@pytest.mark.slow
@pytest.mark.parametrize("model", as_parameters(BROKEN))
def test_a_broken_model_violates_its_property(model):
    with pytest.raises(AssertionError):
        measure(model, {model.check})


@pytest.mark.slow
@pytest.mark.parametrize("model", as_parameters(b for b in BROKEN if b.only))
def test_a_fault_of_one_property_violates_only_that(model):
    measure(model, MEASUREMENTS.keys() - {model.check, SLOW})


@pytest.mark.slow
@pytest.mark.parametrize("model", as_parameters(CORRECT))
def test_a_correct_model_holds_every_property(model):
    measure(model, MEASUREMENTS.keys() - {SLOW})


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", as_parameters(c for c in CORRECT if c.vocab_size < 10_000)[::8]
)
def test_a_correct_model_learns_what_can_be_learnt(model):
    measure(model, {SLOW})


def test_the_zoo_is_large_and_each_model_is_named_and_explained():
    assert len(BROKEN) >= 130
    assert len(CORRECT) >= 65
    for models in (BROKEN, CORRECT):
        assert max(Counter(model.name for model in models).values()) == 1
    assert len({model.sentence for model in BROKEN}) == len(BROKEN)
    for model in (*BROKEN, *CORRECT):
        assert model.sentence.endswith((".", ")"))
        assert model.build() is not model.build(), model.name
