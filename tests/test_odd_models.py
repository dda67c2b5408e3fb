"""Sound models that look odd are not accused; hidden faults are found."""

import pytest
from odd_models import HIDDEN, SOUND

from gpt_duet.invariants import check_model

pytestmark = [
    pytest.mark.usefixtures("one_layer"),
    pytest.mark.unhooked,
]


@pytest.mark.parametrize("model", SOUND)
def test_an_odd_sound_model_is_not_accused(model):
    report = check_model(model, block_size=64, **SOUND[model])
    assert report.ok, str(report)


@pytest.mark.parametrize(("model", "check", "words"), HIDDEN)
def test_a_hidden_fault_is_found(model, check, words):
    result = check_model(model, checks=[check], block_size=32).results[0]
    assert words in result.message
