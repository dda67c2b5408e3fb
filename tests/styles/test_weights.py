"""Weights in GPT-2's layout are imported, exported, or refused."""

import copy
from functools import partial

import pytest
import torch
from both_styles import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpt_duet import annotated, mingpt_style
from gpt_duet.checkpoint.gpt2_layout import load_exactly
from gpt_duet.config import GPTConfig
from gpt_duet.mingpt_style import from_gpt2, from_nanogpt
from gpt_duet.testing.strategies import (
    configs,
    random_model,
    random_state,
    random_tokens,
    seeds,
    shapes,
)

SMALL = GPTConfig(13, 8, n_layer=2, n_head=2, n_embd=8)
TIED = SMALL.replace(tie_weights=True)
TOKENS = random_tokens(SMALL, 2, 8)
EPS = torch.finfo(torch.float64).eps


def log_probs(model):
    return model.eval().log_probs(TOKENS)


@settings(max_examples=30)
@given(data=st.data())
def test_weights_survive_a_round_trip(style, data):
    config = data.draw(configs())
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    state = random_state(config, data.draw(seeds), dtype)
    back = style.to_gpt2(style.from_gpt2(state, config))
    # annotated never ties weights
    if config.tie_weights and style is annotated:
        state["lm_head.weight"] = state["wte.weight"]
        state["lm_head.bias"] = torch.zeros(config.vocab_size, dtype=dtype)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == dtype
        assert back[name].is_contiguous()
        torch.testing.assert_close(back[name], tensor)


@pytest.mark.unhooked  # torch.compile returns an undeclared class
def test_a_fresh_model_is_exported_compiled_or_not(style):
    model = style.build_model(SMALL)
    state = style.to_gpt2(model)
    expected = shapes(SMALL)
    if style is mingpt_style:
        del expected["lm_head.bias"]
    assert {k: tuple(v.shape) for k, v in state.items()} == expected
    compiled = style.to_gpt2(torch.compile(model))
    assert compiled.keys() == state.keys()
    assert all(compiled[name].equal(state[name]) for name in state)


def test_a_prefix_and_mask_buffers_are_dropped(style):
    noisy = {
        name if name.startswith("lm_head") else f"transformer.{name}": tensor
        for name, tensor in random_state(SMALL).items()
    }
    for i in range(2):
        noisy[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 8, 8)
        noisy[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    found = log_probs(style.from_gpt2(noisy, SMALL))
    assert found.equal(log_probs(random_model(style, SMALL)))


def test_the_weights_are_copies_and_the_models_own_to_train(style):
    state = {k: v.requires_grad_() for k, v in random_state(SMALL).items()}
    random_numbers = torch.get_rng_state()
    model = style.from_gpt2(state, SMALL)
    assert torch.get_rng_state().equal(random_numbers)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert not any(buffer.requires_grad for buffer in model.buffers())
    copy.deepcopy(model)  # fails for tensors with a graph
    back = style.to_gpt2(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for name, tensor in before.items():
        assert state[name].equal(tensor)
        torch.testing.assert_close(back[name], tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h.1.ln_2.bias": None}, r"missing h\.1\.ln_2\.bias"),
        ({"wqe": torch.zeros(1)}, "unknown wqe"),
        (
            {"h.0.mlp.c_fc.weight": torch.zeros(32, 8)},
            r"wrong shapes h\.0\.mlp\.c_fc\.weight \(32, 8\) for \(8, 32\)",
        ),
        ({"lm_head.bias": torch.zeros(3)}, r"lm_head\.bias \(3,\) for \(13,"),
        (
            {"transformer.wte.weight": torch.zeros(13, 8)},
            r"wte\.weight occurs twice",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(style, change, message):
    with pytest.raises(ValueError, match=message):
        style.from_gpt2(changed(random_state(SMALL), change), SMALL)


def test_a_long_list_of_missing_keys_is_cut_and_counted():
    with pytest.raises(ValueError, match=r"missing .* and 25 more"):
        from_gpt2({}, SMALL)
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="missing bias"):
        load_exactly(model, {"weight": torch.zeros(3, 2)})


def test_an_absent_head_is_the_token_table():
    state = random_state(TIED)
    expected = log_probs(from_gpt2(state, TIED))
    for style, config in (
        (annotated, TIED),
        (annotated, SMALL),
        (mingpt_style, SMALL),
    ):
        found = log_probs(style.from_gpt2(state, config))
        torch.testing.assert_close(found, expected)


def test_a_head_bias_is_exported_only_if_not_zero():
    state = random_state(SMALL)
    assert from_gpt2(state, SMALL).lm_head.bias is not None
    for nothing in (torch.zeros(13), None):
        state = changed(state, {"lm_head.bias": nothing})
        assert from_gpt2(state, SMALL).lm_head.bias is None


@pytest.mark.parametrize(
    "norm",
    [
        nn.RMSNorm,
        type("MyNorm", (annotated.LayerNorm,), {}),
        partial(nn.LayerNorm, bias=False),
        partial(nn.LayerNorm, elementwise_affine=False),
    ],
)
def test_a_norm_of_another_kind_is_refused(norm):
    model = annotated.make_model(13, N=1, d_model=8, d_ff=8, h=2, norm=norm)
    name = type(model.decoder.norm).__name__
    with pytest.raises(ValueError, match=f"no norm like {name}"):
        annotated.to_gpt2(model)


# A head that is tied to the token table ------------------------------------


def test_a_tied_head_is_one_parameter_and_an_untied_one_its_own():
    tied = from_gpt2(random_state(TIED), TIED)
    assert "lm_head.weight" not in mingpt_style.to_gpt2(tied)
    untied = from_gpt2(random_state(SMALL), SMALL)
    for model in (tied, untied, mingpt_style.build_model(TIED)):
        one = model.lm_head.weight is model.transformer.wte.weight
        assert one == (model is not untied)


@settings(max_examples=30)
@given(
    seed=seeds,
    n_embd=st.integers(2, 40) | st.just(300),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    size=st.sampled_from([1, 1e-4, 1e-6]),  # float16's least is 6e-8
)
def test_a_detour_through_annotated_stays_tied(seed, n_embd, dtype, size):
    config = GPTConfig(13, 8, 1, 1, n_embd, tie_weights=True)
    state = random_state(config, seed, torch.float64)
    state["wte.weight"] *= size
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    detour = annotated.to_gpt2(annotated.from_gpt2(state, config))
    assert "lm_head.weight" in detour
    model = from_gpt2(detour, config)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.bias is None


@pytest.mark.parametrize(
    ("number", "moved", "message"),
    [
        # in [1, 2) eps is one unit in the last place; 4 units may be rounding
        *[(1.5, n * EPS, None) for n in range(-4, 5)],
        *[(1.5, n * EPS, "differs") for n in (-6, -5, 5, 6)],
        (-4.0, 16 * EPS, None),
        (0.0, 1e-300, "differs"),  # differences of small values count too
        (1e-300, -1e-300, "differs"),
        (1.5, 0.25, r"differs .* by up to 0\.25"),
        (1.5, float("nan"), "differs"),
        (1.5, float("inf"), "differs"),
    ],
)
def test_matrices_that_differ_are_not_tied(number, moved, message):
    state = random_state(TIED)
    state["wte.weight"][3, 1] = number
    state["lm_head.weight"] = state["wte.weight"].clone()
    state["lm_head.weight"][3, 1] += moved
    if message is None:
        assert from_gpt2(state, TIED).lm_head.bias is None
    else:
        with pytest.raises(ValueError, match=message):
            from_gpt2(state, TIED)


def test_a_bias_however_small_forbids_tying():
    state = random_state(TIED)
    state["lm_head.bias"] = torch.zeros(13, dtype=torch.float64)
    from_gpt2(state, TIED)
    for size in (0.5, 1e-6):
        state["lm_head.bias"][5] = -size
        with pytest.raises(ValueError, match=rf"bias is up to {size:g}"):
            from_gpt2(state, TIED)


# Files of minGPT and nanoGPT -----------------------------------------------


def nanogpt_state():
    """Return a random model's state dict, in the form that nanoGPT saves."""
    return from_gpt2(random_state(SMALL), SMALL).state_dict()


def test_absent_biases_are_zeros():
    state = nanogpt_state()
    biases = [name for name in state if name.endswith("bias")]
    absent = {k: v for k, v in state.items() if k not in biases}
    zeros = absent | {name: state[name] * 0 for name in biases}
    model = from_nanogpt(absent, SMALL)
    assert log_probs(model).equal(log_probs(from_nanogpt(zeros, SMALL)))
    assert model.lm_head.bias is None
    # if only one bias is missing, this is an error
    damaged = changed(state, {"transformer.h.1.attn.c_proj.bias": None})
    with pytest.raises(ValueError, match=r"missing h\.1\.attn\.c_proj\.bias"):
        from_nanogpt(damaged, SMALL)
