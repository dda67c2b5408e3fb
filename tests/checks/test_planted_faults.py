"""Users plant faults with gpt_duet.testing, and use its strategies."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_gpt import GPT

from gpt_duet.testing import Fault, plant, replaced
from gpt_duet.testing.strategies import configs, models, token_batches

FAULTS: list[Fault] = []


@plant(FAULTS, "causality", GPT, "mask", block_size=8)
def no_mask(self, tokens):
    """Every position sees
    all of them.
    """
    return tokens.new_ones(tokens.size(1), tokens.size(1)).bool()


@plant(FAULTS, "check_shape", vocab_size=17, block_size=8)
class LosesAScore(GPT):
    """The scores lack the last id."""

    def forward(self, tokens):
        return super().forward(tokens)[..., :-1]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_caught_by_its_check(fault):
    (result,) = fault.assert_caught().results
    assert (result.name, result.status) == (fault.check, "failed")


def test_a_fault_has_the_name_and_sentence_of_its_change():
    assert [str(fault) for fault in FAULTS] == [
        "no_mask-check_causality",
        "loses_a_score-check_shape",
    ]
    assert FAULTS[0].sentence == "Every position sees all of them."
    assert issubclass(FAULTS[0].build, GPT)
    assert "mask" in vars(FAULTS[0].build)
    assert FAULTS[1].build is LosesAScore


def test_a_fault_that_its_check_misses_is_an_error():
    sound = Fault("sound", GPT, "It is sound.", check="check_causality")
    with pytest.raises(AssertionError, match="check_causality passes sound"):
        sound.assert_caught(block_size=4)
    assert Fault("sound", GPT, "It is sound.").report(checks=["shape"]).ok


def test_a_fault_that_replaces_nothing_is_refused():
    with pytest.raises(AttributeError, match="GPT has no 'masc' to replace"):
        replaced(GPT, "masc", no_mask)
    with pytest.raises(ValueError, match="silent needs a docstring"):

        @plant([], "causality", GPT, "mask")
        def silent(self, tokens):
            return None


@settings(max_examples=5)
@pytest.mark.unhooked  # not with --check-shapes, which draws random numbers
@given(data=st.data())
def test_drawn_models_answer_drawn_tokens(data):
    config = data.draw(configs(min_embd=4, n_layer=1, vocab_size=9))
    assert (config.n_layer, config.vocab_size) == (1, 9)
    assert config.n_embd >= 4
    tokens = data.draw(token_batches(config))
    assert tokens.size(1) <= config.block_size
    assert not data.draw(models(config)).training
    scores = data.draw(models(config)).log_probs(tokens)
    assert scores.shape == (*tokens.shape, 9)


def test_strategies_without_hypothesis_say_what_to_install():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import gpt_duet.testing\n"
        "try: import gpt_duet.testing.strategies\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert 'needs hypothesis: pip install "gpt-duet[testing]"' in said
