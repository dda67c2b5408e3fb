"""GPTConfig: invalid values, defaults, presets."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given

from gpt_duet.config import GPTConfig, preset_names
from gpt_duet.generation import Sampler
from gpt_duet.testing.strategies import configs
from gpt_duet.training.recipe import Recipe
from gpt_duet.validation import is_number, whole_number


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("block_size", 0),
        ("n_layer", 1.5),
        ("n_head", 0),
        ("n_embd", 1),
        ("n_inner", 0),
        ("dropout", -0.1),
        ("dropout", 1.0),
        ("activation", "swish"),
        ("tie_weights", "yes"),
        ("norm_eps", -1e-5),
        ("norm_eps", float("inf")),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(field, value):
    fields = {"vocab_size": 10, "block_size": 8, "n_head": 1} | {field: value}
    with pytest.raises(ValueError, match=field) as caught:
        GPTConfig(**fields)
    assert str(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_defaults_are_gpt2s_and_the_inner_width_follows_the_width():
    config = GPTConfig(10, 8)
    assert (config.n_layer, config.n_head, config.n_embd) == (12, 12, 768)
    assert (config.n_inner, config.inner_size) == (None, 3072)
    assert (config.dropout, config.activation) == (0.1, "gelu_tanh")
    assert (config.tie_weights, config.norm_eps) == (False, None)
    assert config.replace(n_embd=24).inner_size == 96


@given(configs())
def test_a_config_survives_a_round_trip_and_cannot_be_changed(config):
    assert GPTConfig(**dataclasses.asdict(config)) == config
    assert config.inner_size == config.n_inner or config.n_inner is None
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layer = 3


PRESETS = {
    "gpt2": (12, 12, 768, 3072, 50257, 1024, True),
    "gpt2-medium": (24, 16, 1024, 4096, 50257, 1024, True),
    "gpt2-large": (36, 20, 1280, 5120, 50257, 1024, True),
    "gpt2-xl": (48, 25, 1600, 6400, 50257, 1024, True),
    "openai-gpt": (12, 12, 768, 3072, 40478, 512, True),
    "gpt-mini": (6, 6, 192, 768, 99, 33, False),
    "gpt-micro": (4, 4, 128, 512, 99, 33, False),
    "gpt-nano": (3, 3, 48, 192, 99, 33, False),
    "annotated-base": (6, 8, 512, 2048, 99, 33, False),
}


def test_each_preset_has_its_published_sizes():
    assert PRESETS.keys() == set(preset_names())
    for name, sizes in PRESETS.items():
        open_fields = {"vocab_size": 99, "block_size": 33}
        c = GPTConfig.preset(name, **{} if sizes[-1] else open_fields)
        found = c.n_layer, c.n_head, c.n_embd, c.inner_size, c.vocab_size
        assert (*found, c.block_size, c.tie_weights) == sizes, name
    config = GPTConfig.preset("gpt2", n_layer=2, tie_weights=False)
    assert config == GPTConfig(50257, 1024, n_layer=2)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gpt3", {}, "unknown preset 'gpt3'; known: gpt2, "),
        ("gpt-nano", {}, "does not set block_size, vocab_size"),
        ("gpt2", {"n_heads": 3}, "unknown fields: n_heads"),
        # n_head does not divide n_embd
        ("gpt2", {"n_head": 5}, "n_embd=768 and n_head=5"),
    ],
)
def test_a_preset_that_cannot_be_is_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig.preset(name, **fields)


@pytest.mark.unhooked
def test_numpys_numbers_become_pythons():
    config = GPTConfig(
        np.int64(5), np.int32(4), np.uint8(1), 1, np.int16(8),
        n_inner=np.int64(12), dropout=np.float32(0.5),
        norm_eps=np.float64(1e-5),
    )  # fmt: skip
    plain = GPTConfig(5, 4, 1, 1, 8, 12, dropout=0.5, norm_eps=1e-5)
    assert config == plain
    values = dataclasses.asdict(config)
    assert json.loads(json.dumps(values)) == values  # JSON has no NumPy types
    assert Recipe(steps=np.int64(3), lr=np.float32(0.5)).steps == 3
    assert Sampler(np.float32(0.5), top_k=np.int64(2)).top_k == 2


def test_a_number_is_finite_and_not_a_boolean():
    assert all(map(is_number, (0, -1.5, np.float16(2), np.int8(3), 10**400)))
    for value in (True, math.nan, np.float32("inf"), "1", None, 1j):
        assert not is_number(value)


def test_a_whole_number_is_an_integer_of_any_kind():
    assert whole_number("n", np.int64(3)) == 3
    assert type(whole_number("n", np.int64(3))) is int
    for value in (True, 2.0, "2", None, np.ones(2)):
        with pytest.raises(ValueError, match="n must be a whole number, got"):
            whole_number("n", value)
    with pytest.raises(ValueError, match="n must be at least 2, got 1"):
        whole_number("n", 1, at_least=2)
    with pytest.raises(ValueError, match="n must be at most 1,000, got 1001"):
        whole_number("n", 1001, at_most=1000)
