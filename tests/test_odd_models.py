"""Sound models that look odd are not accused; hidden faults are found."""

from functools import partial

import pytest
import torch
import torch._dynamo  # where it is loaded, each model may be a compiled one
from odd_models import HIDDEN, SOUND, short

from gpt_duet.invariants import check_model

pytestmark = [
    pytest.mark.usefixtures("one_layer"),
    pytest.mark.unhooked,
]


@pytest.mark.parametrize("model", SOUND)
def test_an_odd_sound_model_is_not_accused(model):
    report = check_model(model, **{"block_size": 24} | SOUND[model])
    assert report.ok, str(report)


@pytest.mark.parametrize(("model", "check", "words"), HIDDEN)
def test_a_hidden_fault_is_found(model, check, words):
    result = check_model(model, checks=[check], block_size=32).results[0]
    assert words in result.message


def test_a_model_is_compiled_where_that_is_asked_for(monkeypatch):
    quick = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", quick)
    report = check_model(short(), checks=["causality"], compile=True)
    assert (
        "compiled, in float32 on cpu, it gives the"
        in report.results[0].message
    )
