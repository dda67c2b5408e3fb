"""Equal weights give equal log-probabilities."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import log_probs as reference_log_probs
from torch import nn

from gpt_duet import annotated, mingpt_style
from gpt_duet.agreement import enlarged_random_weights, rounding_bound
from gpt_duet.checkpoint import convert
from gpt_duet.comparison.models import compare_models, stage_outputs
from gpt_duet.comparison.styles import compare_pair, make_pair
from gpt_duet.config import GPTConfig
from gpt_duet.protocol import load_style, style_of
from gpt_duet.testing.strategies import (
    configs,
    random_model,
    random_state,
    random_tokens,
    seeds,
    token_batches,
)

STYLES = ("annotated", "mingpt_style")
STAGES = (annotated.STAGES, mingpt_style.STAGES)
SMALL = GPTConfig(11, 8, n_layer=2, n_head=2, n_embd=8)
TOKENS = random_tokens(SMALL, 2, 8)


def compare(config, tokens, dtype=torch.float64, seed=0, styles=STYLES):
    packages = tuple(map(load_style, styles))
    state = enlarged_random_weights(packages[1], config, seed)
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    pair = make_pair(packages, config, state, tokens)
    return compare_pair(pair, weights="random")


@given(data=st.data())
def test_the_whole_model_is_one_function(data):
    # with eps 0, a norm of a few nearly equal features amplifies rounding
    config = data.draw(configs(min_embd=8, norm_eps=0.0))
    state = random_state(config, data.draw(seeds))
    tokens = data.draw(token_batches(config))
    norm = data.draw(st.sampled_from([annotated.LayerNorm, nn.LayerNorm]))
    a = annotated.from_gpt2(state, config, norm=norm).eval()
    b = mingpt_style.from_gpt2(state, config).eval()
    ours, theirs = a.log_probs(tokens), b.log_probs(tokens)
    assert (ours - theirs).abs().max() <= 1e-12
    # the gradients of the token table agree as well, tied or not
    tables = a.embed[0].lut.weight, a.generator.proj.weight
    lut, head = torch.autograd.grad(ours[..., 0].sum(), tables)
    expected = lut / math.sqrt(config.n_embd) + config.tie_weights * head
    wte = b.transformer.wte.weight
    (found,) = torch.autograd.grad(theirs[..., 0].sum(), wte)
    largest = expected.abs().max()
    assert (found - expected).abs().max() <= 1e-12 * largest


@settings(max_examples=12)
@given(data=st.data())
def test_both_styles_compute_what_the_loops_compute(data):
    config = data.draw(configs(min_embd=3, norm_eps=1e-5, n_layer=2))
    state = random_state(config, data.draw(seeds))
    tokens = data.draw(token_batches(config))
    rows = tokens.tolist()
    loops = [reference_log_probs(state, config, row, eps=1e-5) for row in rows]
    for name in STYLES:
        model = load_style(name).from_gpt2(state, config).eval()
        with torch.no_grad():
            ours = model.log_probs(tokens)
        np.testing.assert_allclose(ours, loops, rtol=1e-9, atol=1e-9)


@settings(max_examples=15)
@given(data=st.data())
def test_any_chain_of_conversions_computes_the_same(data):
    config = data.draw(configs(min_embd=3, norm_eps=1e-5))
    tokens = data.draw(token_batches(config))
    model = random_model(mingpt_style, config, data.draw(seeds))
    expected = model.log_probs(tokens)
    chain = data.draw(st.lists(st.sampled_from(STYLES), max_size=5))
    for name in chain:
        model = convert(model, name)
        assert type(model).__module__.startswith(f"gpt_duet.{name}.")
        assert model.config == config
        assert not model.training
    assert convert(model.train(), "annotated").training
    assert (model.eval().log_probs(tokens) - expected).abs().max() <= 1e-12


def test_every_stage_agrees_and_a_wrong_one_is_found():
    state = random_state(SMALL)
    a = annotated.from_gpt2(state, SMALL)
    b = mingpt_style.from_gpt2(state, SMALL)
    differences, _ = compare_models(a, b, STAGES, TOKENS)
    blocks = [
        f"block.{i}{part}"
        for i in range(2)
        for part in (".attention", ".feed_forward", "")
    ]
    stages = ["embedding", *blocks, "final_norm", "log_probs"]
    assert list(differences) == stages
    assert max(differences.values()) < 1e-12
    assert a.training  # the call restores the mode
    assert b.training

    with torch.no_grad():
        b.transformer.h[1].attn.c_proj.bias[3] += 1e-3
    differences, _ = compare_models(a, b, STAGES, TOKENS)
    wrong = [s for s, d in differences.items() if d > 1e-12]
    assert wrong[0] == "block.1.attention"
    assert "block.0" not in wrong
    assert differences["block.1.attention"] == pytest.approx(1e-3)


def test_a_missing_stage_is_named():
    model = random_model(mingpt_style, SMALL)
    with pytest.raises(ValueError, match="no such stage of GPT: GPT has no"):
        stage_outputs(model, {"embedding": "nowhere"}, TOKENS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation", "relu"),
        ("n_head", 4),
        ("norm_eps", 0.5),
        ("n_inner", 31),
        ("dropout", 0.2),
    ],
)
def test_models_of_different_configs_are_not_compared(field, value):
    a = annotated.build_model(SMALL)
    spelt_out = mingpt_style.build_model(SMALL.replace(n_inner=32))
    assert compare_models(a, spelt_out, STAGES, TOKENS)
    b = mingpt_style.build_model(SMALL.replace(**{field: value}))
    first = 32 if field == "n_inner" else getattr(SMALL, field)
    with pytest.raises(ValueError, match=f"{field} differs: {first!r} and"):
        compare_models(a, b, STAGES, TOKENS)


@settings(max_examples=10)
@given(data=st.data())
def test_the_verdict_is_one_function(data):
    config = data.draw(configs(min_embd=4, norm_eps=None))
    tokens = random_tokens(config, 1, config.block_size)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    before = torch.get_rng_state()
    found = compare(config, tokens, dtype, data.draw(seeds))
    assert torch.get_rng_state().equal(before)
    assert found.one_function, found.verdict
    assert found.verdict.startswith("one function: largest difference ")
    if dtype == torch.float64:
        assert found.bound == 1e-12
    assert found.next_tokens[0][0][0] == found.next_tokens[1][0][0]
    for name, count in zip(STYLES, found.parameters, strict=True):
        parameters = load_style(name).build_model(config).parameters()
        assert count["total"] == sum(p.numel() for p in parameters)


@pytest.mark.parametrize("wrong", [1e-5, float("nan")])
def test_the_verdict_is_two_functions(wrong, monkeypatch):
    whole = annotated.from_gpt2

    def slightly_wrong(state, config, **parts):
        head = state["lm_head.weight"].clone()
        head[0] += wrong
        return whole(state | {"lm_head.weight": head}, config, **parts)

    monkeypatch.setattr(annotated, "from_gpt2", slightly_wrong)
    found = compare(SMALL, TOKENS)
    assert not found.one_function
    assert found.verdict.startswith("two functions: ")


def test_the_bound_is_twice_the_models_own_rounding():
    state = enlarged_random_weights(mingpt_style, SMALL, 0)
    # a new model is in train mode
    model = mingpt_style.from_gpt2(state, SMALL)
    exact = copy.deepcopy(model).eval().double().log_probs(TOKENS)
    log_probs = model.eval().log_probs(TOKENS)
    error = (log_probs.double() - exact).abs().max()
    assert error > 0
    bound = rounding_bound(model.train(), TOKENS, log_probs)
    assert bound == pytest.approx(2 * error.item() + 1e-6)


def test_facts_about_each_style_are_correct():
    # a style with an untied head may take the weights of a tied one
    tied = SMALL.replace(tie_weights=True)
    assert compare(tied, TOKENS, styles=STYLES[::-1]).one_function
    config = GPTConfig(50, 8, n_layer=2, n_head=2, n_embd=8, n_inner=12)
    tokens = random_tokens(config, 1, 8)
    found = compare(config, tokens)
    state = enlarged_random_weights(mingpt_style, config, 0)
    state = {name: tensor.double() for name, tensor in state.items()}
    expected = mingpt_style.from_gpt2(state, config).eval().log_probs(tokens)
    for ids in found.next_tokens:
        best = expected[0, -1].argsort(descending=True)[:5]
        assert [i for i, _ in ids] == best.tolist()
    left, right = found.parameters
    assert left["attention"] == right["attention"] == 2 * (4 * 64 + 4 * 8)
    assert left["feed_forward"] == 2 * (2 * 8 * 12 + 8 + 12)
    assert left["norms"] == right["norms"] == 5 * 16
    assert (left["embedding"], right["embedding"]) == (400, 464)
    assert (left["head"], right["head"]) == (450, 400)
    assert (left["buffers"], right["buffers"]) == (64, 0)
    for first, median, third in found.seconds:
        assert 0 < first <= median <= third
    assert found.threads == 1  # because there is little work
    (part,) = found.original_parts
    words, _, difference = part.rpartition(" ")
    assert words == (
        "In this comparison annotated ran with nn.LayerNorm; with its own "
        "LayerNorm (eps outside the root) the log-probabilities of the two "
        "models differ by"
    )
    assert found.bound < float(difference) < 1e-3


@pytest.mark.parametrize("eps", [None, 0.0])
def test_a_norm_that_the_layout_lacks_is_reported(eps):
    # annotated's eps is outside the root; with eps 0 the functions are equal
    model = annotated.build_model(SMALL.replace(norm_eps=eps)).double().eval()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        other = convert(model, "mingpt_style")
    moved = (other.log_probs(TOKENS) - model.log_probs(TOKENS)).abs().max()
    words = [str(warning.message) for warning in given]
    assert (moved > 1e-9) == (words != []) == (eps is None)
    assert all("annotated.LayerNorm (eps outside the" in w for w in words)


def test_a_subclass_belongs_to_its_style():
    class Mine(mingpt_style.GPT):
        pass

    assert style_of(Mine(SMALL)) is mingpt_style
    with pytest.raises(ValueError, match="Linear belongs to no style"):
        style_of(nn.Linear(1, 1))


def test_an_import_that_fails_inside_a_style_is_not_hidden(
    tmp_path, monkeypatch
):
    """The error is not reported as a missing style."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_a_style.py").write_text("import not_installed")
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        load_style("half_a_style")
