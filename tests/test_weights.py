"""The GPT-2 layout in and out of both styles, and what does not fit."""

import copy
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    STYLES,
    configs,
    random_state,
    random_tokens,
    seeds,
    shapes,
)
from torch import nn

import annotated
import mingpt_style
from shared.checkpoint.gpt2_layout import load_exactly, units_apart
from shared.config import GPTConfig

SMALL = GPTConfig(13, 8, n_layer=2, n_head=2, n_embd=8)
TIED = SMALL.replace(tie_weights=True)

both = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


@both
@settings(max_examples=30)
@given(data=st.data())
def test_weights_come_back_as_they_went_in(style, data):
    config = data.draw(configs())
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    state = random_state(config, data.draw(seeds), dtype)
    back = style.to_gpt2(style.from_gpt2(state, config))
    if config.tie_weights and style is annotated:  # it never ties
        state["lm_head.weight"] = state["wte.weight"]
        state["lm_head.bias"] = torch.zeros(config.vocab_size, dtype=dtype)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == dtype
        assert back[name].is_contiguous()
        torch.testing.assert_close(back[name], tensor)


@both
def test_a_style_writes_the_shapes_of_the_layout(style):
    state = style.to_gpt2(style.build_model(SMALL))
    expected = shapes(SMALL)
    if style is mingpt_style:
        del expected["lm_head.bias"]
    assert {k: tuple(v.shape) for k, v in state.items()} == expected


@pytest.mark.unhooked  # what torch.compile returns is of another class
@both
def test_a_compiled_model_gives_the_same_weights(style):
    model = style.build_model(SMALL)
    expected = style.to_gpt2(model)
    found = style.to_gpt2(torch.compile(model))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)


@both
def test_a_prefix_and_mask_buffers_are_dropped(style):
    state = random_state(SMALL)
    model = style.from_gpt2(state, SMALL).eval()
    noisy = {
        name if name.startswith("lm_head") else f"transformer.{name}": tensor
        for name, tensor in state.items()
    }
    for i in range(2):
        noisy[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 8, 8)
        noisy[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    tokens = random_tokens(SMALL, 2, 8)
    other = style.from_gpt2(noisy, SMALL).eval()
    assert other.log_probs(tokens).equal(model.log_probs(tokens))


@both
def test_the_weights_are_copies(style):
    state = random_state(SMALL)
    model = style.from_gpt2(state, SMALL)
    back = style.to_gpt2(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for name, tensor in before.items():
        assert state[name].equal(tensor)
        torch.testing.assert_close(back[name], tensor)


@both
def test_loading_draws_no_random_numbers(style):
    before = torch.get_rng_state()
    style.from_gpt2(random_state(SMALL), SMALL)
    assert torch.get_rng_state().equal(before)


@both
def test_loaded_parameters_are_trained(style):
    model = style.from_gpt2(random_state(SMALL), SMALL)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert not any(p.is_meta for p in model.parameters())


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("h.1.ln_2.bias"), r"missing h\.1\.ln_2\.bias"),
        (lambda s: s.pop("wte.weight"), r"missing wte\.weight"),
        (lambda s: s.update(wqe=torch.zeros(1)), "unknown wqe"),
        (
            lambda s: s.update({"h.2.ln_1.bias": torch.zeros(8)}),
            r"unknown h\.2\.ln_1\.bias",
        ),
        (
            lambda s: s.update({"h.0.mlp.c_fc.weight": torch.zeros(32, 8)}),
            r"another shape h\.0\.mlp\.c_fc\.weight \(32, 8\) for \(8, 32\)",
        ),
        (
            lambda s: s.update({"wpe.weight": torch.zeros(9, 8)}),
            r"wpe\.weight \(9, 8\) for \(8, 8\)",
        ),
        (
            lambda s: s.update({"lm_head.bias": torch.zeros(3)}),
            r"lm_head\.bias \(3,\) for \(13,\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(style, change, message):
    state = random_state(SMALL)
    change(state)
    with pytest.raises(ValueError, match=message):
        style.from_gpt2(state, SMALL)


def test_a_long_list_is_cut_and_counted():
    with pytest.raises(ValueError, match=r"missing .* and 25 more"):
        mingpt_style.from_gpt2({}, SMALL)


def test_an_absent_head_is_the_token_table():
    state = random_state(TIED)
    tokens = random_tokens(SMALL, 2, 8)
    expected = mingpt_style.from_gpt2(state, TIED).eval().log_probs(tokens)
    for model in (
        annotated.from_gpt2(state, TIED),
        annotated.from_gpt2(state, SMALL),
        mingpt_style.from_gpt2(state, SMALL),
    ):
        found = model.eval().log_probs(tokens)
        torch.testing.assert_close(found, expected)


class TestTying:
    def test_a_tied_head_is_one_parameter(self):
        model = mingpt_style.from_gpt2(random_state(TIED), TIED)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert "lm_head.weight" not in mingpt_style.to_gpt2(model)
        fresh = mingpt_style.build_model(TIED)
        assert fresh.lm_head.weight is fresh.transformer.wte.weight

    def test_an_untied_head_is_its_own(self):
        model = mingpt_style.from_gpt2(random_state(SMALL), SMALL)
        assert model.lm_head.weight is not model.transformer.wte.weight

    @settings(max_examples=30)
    @given(
        seed=seeds,
        n_embd=st.integers(2, 40),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def test_a_detour_through_annotated_stays_tied(self, seed, n_embd, dtype):
        config = GPTConfig(13, 8, 1, 1, n_embd, tie_weights=True)
        state = random_state(config, seed, dtype)
        detour = annotated.to_gpt2(annotated.from_gpt2(state, config))
        assert "lm_head.weight" in detour
        model = mingpt_style.from_gpt2(detour, config)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.lm_head.bias is None

    def test_matrices_that_differ_are_not_tied(self):
        state = random_state(TIED)
        state["lm_head.weight"] = state["wte.weight"].clone()
        state["lm_head.weight"][3, 1] += 0.25
        with pytest.raises(ValueError, match=r"differs .* by up to 0\.25"):
            mingpt_style.from_gpt2(state, TIED)

    @pytest.mark.parametrize("units", range(-6, 7))
    def test_four_units_in_the_last_place_are_rounding(self, units):
        state = random_state(TIED)
        state["wte.weight"][3, 1] = 1.5  # from 1 to 2 a unit is eps
        state["lm_head.weight"] = state["wte.weight"].clone()
        state["lm_head.weight"][3, 1] += units * torch.finfo(float).eps
        if abs(units) <= 4:
            assert mingpt_style.from_gpt2(state, TIED).lm_head.bias is None
        else:
            with pytest.raises(ValueError, match="differs"):
                mingpt_style.from_gpt2(state, TIED)

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
    def test_matrices_that_cannot_be_compared_are_not_tied(self, wrong):
        state = random_state(TIED)
        state["lm_head.weight"] = state["wte.weight"].clone()
        state["lm_head.weight"][3, 1] = wrong
        with pytest.raises(ValueError, match="differs"):
            mingpt_style.from_gpt2(state, TIED)

    def test_a_bias_forbids_tying(self):
        state = random_state(TIED)
        state["lm_head.bias"] = torch.zeros(13, dtype=torch.float64)
        mingpt_style.from_gpt2(state, TIED)
        state["lm_head.bias"][5] = -0.5
        with pytest.raises(ValueError, match=r"lm_head\.bias is up to 0\.5"):
            mingpt_style.from_gpt2(state, TIED)

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    )
    def test_units_in_the_last_place(self, dtype):
        eps = torch.finfo(dtype).eps
        a = torch.tensor([1.0, 1.5, 0.0, -4.0], dtype=dtype)
        b = torch.tensor([1 + 3 * eps, 1.5, 0.0, -4.0 - 8 * eps], dtype=dtype)
        assert units_apart(a, a) == 0
        assert units_apart(a, b) == 3


def test_a_bias_of_the_head_appears_only_where_it_is_not_zero():
    state = random_state(SMALL)
    assert mingpt_style.from_gpt2(state, SMALL).lm_head.bias is not None
    state["lm_head.bias"].zero_()
    assert mingpt_style.from_gpt2(state, SMALL).lm_head.bias is None
    del state["lm_head.bias"]
    assert mingpt_style.from_gpt2(state, SMALL).lm_head.bias is None


def test_a_norm_of_another_kind_has_no_place_in_the_layout():
    model = annotated.make_model(
        13, N=1, d_model=8, d_ff=8, h=2, norm=nn.RMSNorm
    )
    with pytest.raises(ValueError, match="no norm like RMSNorm"):
        annotated.to_gpt2(model)


class TestNanogpt:
    def state(self, config=SMALL):
        """What nanoGPT would save of the same function."""
        return mingpt_style.from_gpt2(
            random_state(config), config
        ).state_dict()

    def test_its_own_state_dict_is_read(self):
        model = mingpt_style.from_nanogpt(self.state(), SMALL).eval()
        expected = mingpt_style.from_gpt2(random_state(SMALL), SMALL).eval()
        tokens = random_tokens(SMALL, 2, 8)
        assert model.log_probs(tokens).equal(expected.log_probs(tokens))

    def test_a_compiled_model_and_its_mask_buffers(self):
        state = {f"_orig_mod.{k}": v for k, v in self.state().items()}
        mask = torch.ones(1, 1, 8, 8)
        state["_orig_mod.transformer.h.0.attn.bias"] = mask
        model = mingpt_style.from_nanogpt(state, SMALL).eval()
        expected = mingpt_style.from_nanogpt(self.state(), SMALL).eval()
        tokens = random_tokens(SMALL, 2, 8)
        assert model.log_probs(tokens).equal(expected.log_probs(tokens))

    def test_absent_biases_are_zeros(self):
        zeros = {
            name: torch.zeros_like(tensor) if name.endswith("bias") else tensor
            for name, tensor in self.state().items()
        }
        absent = {
            name: tensor
            for name, tensor in self.state().items()
            if not name.endswith("bias")
        }
        tokens = random_tokens(SMALL, 2, 8)
        model = mingpt_style.from_nanogpt(absent, SMALL).eval()
        expected = mingpt_style.from_nanogpt(zeros, SMALL).eval()
        assert model.log_probs(tokens).equal(expected.log_probs(tokens))
        assert model.lm_head.bias is None

    def test_a_linear_of_gpt2_orientation_is_refused(self):
        state = self.state()
        name = "transformer.h.0.mlp.c_fc.weight"
        state[name] = state[name].t()
        with pytest.raises(ValueError, match=re.escape("(32, 8) for (8, 32)")):
            mingpt_style.from_nanogpt(state, SMALL)


def test_loading_exactly_means_every_key():
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="missing bias"):
        load_exactly(model, {"weight": torch.zeros(3, 2)})


def test_a_small_unit_is_a_unit_too():
    zero, tiny = torch.tensor([0.0]), torch.tensor([2e-7])
    assert units_apart(zero, zero) == 0
    assert units_apart(zero, tiny) > 4
    assert units_apart(tiny, zero) > 4


def test_a_bias_however_small_forbids_tying():
    state = random_state(TIED)
    state["lm_head.bias"] = torch.full((13,), 1e-6, dtype=torch.float64)
    with pytest.raises(ValueError, match="is up to 1e-06"):
        mingpt_style.from_gpt2(state, TIED)


@both
def test_a_name_given_twice_is_refused(style):
    state = random_state(SMALL)
    state["transformer.wte.weight"] = state["wte.weight"] + 1
    with pytest.raises(ValueError, match=r"wte\.weight is there twice"):
        style.from_gpt2(state, SMALL)


@both
def test_tensors_with_a_history_are_taken_without_it(style):
    source = {k: v.requires_grad_() for k, v in random_state(SMALL).items()}
    model = style.from_gpt2(source, SMALL)
    assert not any(buffer.requires_grad for buffer in model.buffers())
    copy.deepcopy(model)


@pytest.mark.parametrize(
    "norm",
    [
        type("MyNorm", (annotated.LayerNorm,), {}),
        partial(nn.LayerNorm, bias=False),
        partial(nn.LayerNorm, elementwise_affine=False),
    ],
)
def test_a_norm_that_only_looks_like_one_has_no_place(norm):
    model = annotated.make_model(13, 1, 8, 8, 2, norm=norm)
    with pytest.raises(ValueError, match="no norm like"):
        annotated.to_gpt2(model)
