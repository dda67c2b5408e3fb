"""Sound models that look odd pass, and hidden faults are found."""

import os
from functools import partial
from shutil import which

import pytest
import torch
import torch._dynamo  # once this is imported, any model may be compiled
from odd_models import (
    HIDDEN,
    ODD_TO_A_PROOF,
    SOUND,
    SOUND_ONCE_FAILED,
    AheadCompiled,
    Blocks,
    LossAloneAndHint,
    short,
)
from rows import slow_unless
from small_gpt import GPT

from gpt_duet.invariants import CHECKS, check_model

pytestmark = [
    pytest.mark.usefixtures("one_layer"),
    pytest.mark.unhooked,
]


# the two checks that take half of the time of all checks
PROOFS = {"check_causality", "check_batch_independence"}
SLOW = "check_entropy_bound"
QUICK = (["loss"], ["gradients"])
FAST = [*ODD_TO_A_PROOF][1:4]


def is_not_accused(model, checks):
    given = {"block_size": 12, "checks": checks} | SOUND[model]
    report = check_model(model, **given)
    assert report.ok, str(report)


@pytest.mark.parametrize("model", slow_unless(FAST.__contains__, SOUND))
def test_an_odd_sound_model_passes(model):
    is_not_accused(model, CHECKS.keys() - PROOFS - {SLOW})


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(m, marks=() if m in FAST else pytest.mark.slow)
        for m in SOUND
        if "checks" not in SOUND[m]
    ],
)
def test_an_odd_sound_model_passes_both_proofs(model):
    is_not_accused(model, PROOFS)


@pytest.mark.parametrize(
    "model",
    slow_unless(
        lambda model: SOUND_ONCE_FAILED[model]["checks"] in QUICK,
        SOUND_ONCE_FAILED,
    ),
)
def test_a_sound_model_that_failed_once_passes(model):
    settings = {"block_size": 12} | SOUND_ONCE_FAILED[model]
    report = check_model(model, **settings)
    assert {r.status for r in report.results} == {"passed"}, str(report)


@pytest.mark.parametrize(("model", "check", "words"), HIDDEN)
def test_a_hidden_fault_is_found(model, check, words):
    result = check_model(model, checks=[check], block_size=32).results[0]
    assert words in result.message


@pytest.mark.slow
def test_a_model_is_compiled_on_request(monkeypatch):
    quick = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", quick)
    report = check_model(short(), checks=["causality"], compile=True)
    assert (
        "compiled, in float32 on cpu, it gives the"
        in report.results[0].message
    )


@pytest.mark.slow
@pytest.mark.skipif(
    which(os.environ.get("CXX", "g++")) is None,
    reason="inductor needs a C++ compiler on a CPU",
)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (GPT, "gives the same scores at 1, 8, with gradients at 1, 8, and"),
        (AheadCompiled, "the compiled program is another function: position"),
        (partial(GPT, mixer=Blocks), "gives the same scores at 1, 8, and"),
    ],
)
def test_the_program_of_inductor_is_compared(model, words):
    model = torch.compile(model(block_size=8))
    (result,) = check_model(model, checks=["causality"]).results
    assert words in result.message, result.message


def test_a_method_for_scores_gets_the_users_arguments():
    report = check_model(
        LossAloneAndHint,
        checks=["causality"],
        block_size=8,
        inputs={"hint": torch.ones_like},
    )
    assert "position 0 sees token 1" in report.results[0].message
