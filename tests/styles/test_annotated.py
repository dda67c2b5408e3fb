"""The annotated style computes what the code of its tutorial computes."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpt_duet import annotated, mingpt_style
from gpt_duet.annotated import (
    LayerNorm,
    PositionalEncoding,
    build_model,
    make_model,
)
from gpt_duet.config import GPTConfig
from gpt_duet.masks import subsequent_mask

TINY = {"N": 2, "d_model": 12, "d_ff": 20, "h": 3}


@pytest.fixture(scope="module")
def listing(sibling):
    """Run the code blocks of the tutorial, and return the names they define.

    The tutorial omits most of its imports, so the fixture supplies them.
    """
    names = {"torch": torch, "copy": copy, "math": math, "F": F, "nn": nn}
    names["Variable"] = torch.autograd.Variable
    text = sibling / "texts" / "architecture-of-gpt-models.md"
    blocks = re.findall(r"```python\n(.*?)```", text.read_text("utf-8"), re.S)
    for block in blocks[1:]:
        exec(block, names)
    return names


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sizes", [TINY, {"N": 1, "d_model": 8, "h": 2}, {}])
def test_the_same_seed_gives_the_same_weights(listing, sizes, seed):
    torch.manual_seed(seed)
    original = listing["make_model"](31, **sizes)
    torch.manual_seed(seed)
    ours = make_model(31, **sizes)
    for (name, found), (theirs, expected) in zip(
        ours.named_parameters(), original.named_parameters(), strict=True
    ):
        assert name == theirs
        assert found.equal(expected), name


def test_an_original_state_dict_loads_and_computes_the_same(listing):
    original = listing["make_model"](31, **TINY).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = make_model(31, **TINY).eval()
    ours.load_state_dict(original.state_dict(), strict=True)
    tokens = torch.randint(31, (3, 9))
    outputs = []
    for model in (original, ours):
        hidden = model(tokens, subsequent_mask(9))
        log_probs = model.generator(hidden)
        log_probs[..., 1].sum().backward()
        gradients = [p.grad for p in model.parameters()]
        outputs.append([hidden, log_probs, *gradients])
    torch.testing.assert_close(*outputs)


@given(st.integers(2, 9), st.integers(1, 12))
def test_positions_are_sines_and_cosines(d_model, max_len):
    table = PositionalEncoding(d_model, 0.0, max_len).pe
    assert table.shape == (1, max_len, d_model)
    for position in range(max_len):
        for i in range(d_model):
            angle = position / 10000 ** (2 * (i // 2) / d_model)
            want = math.cos(angle) if i % 2 else math.sin(angle)
            assert abs(table[0, position, i].item() - want) <= 1e-6


def test_positions_are_right_when_built_in_half_precision():
    exact = PositionalEncoding(16, 0.0).pe
    torch.set_default_dtype(torch.bfloat16)
    try:
        half = PositionalEncoding(16, 0.0).pe
    finally:
        torch.set_default_dtype(torch.float32)
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().max() <= 2**-8


@given(st.integers(2, 20))
def test_the_norm_divides_by_the_deviation_of_n_minus_1(features):
    x = torch.randn(3, features, dtype=torch.float64)
    norm = LayerNorm(features, eps=0.0).double()
    same = nn.LayerNorm(features, eps=0.0).double()
    factor = math.sqrt((features - 1) / features)
    torch.testing.assert_close(norm(x), same(x) * factor)
    with torch.no_grad():
        norm.a_2.fill_(2.0)
        norm.b_2.fill_(3.0)
    torch.testing.assert_close(norm(x), same(x) * factor * 2 + 3)


def test_the_norm_adds_its_eps_outside_the_root():
    x = torch.tensor([[1.0, 3.0]])
    norm = LayerNorm(2, eps=0.5)
    expected = torch.tensor([[-1.0, 1.0]]) / (math.sqrt(2) + 0.5)
    torch.testing.assert_close(norm(x), expected)


def test_one_feature_has_no_deviation():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        LayerNorm(1)


def test_the_dropout_of_make_model_reaches_every_part():
    model = make_model(11, **TINY, dropout=0.25)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert set(rates) == {0.25}
    assert len(rates) == 1 + 2 * (1 + 1 + 2)


def test_make_model_has_the_sizes_of_the_paper():
    model = make_model(50257)
    assert model.block_size == PositionalEncoding(16, 0.0).pe.size(1) == 5000
    assert len(model.decoder.layers) == 6
    layer = model.decoder.layers[0]
    assert (layer.self_attn.h, layer.self_attn.d_k) == (8, 64)
    assert layer.feed_forward.w_1.out_features == 2048
    assert sum(p.numel() for p in model.parameters()) == 70_428_753
    assert isinstance(layer.sublayer[0].norm, LayerNorm)
    assert model.config == GPTConfig(
        50257, 5000, 6, 8, 512, 2048, 0.1, "relu", False, None
    )


def test_build_model_mends_the_initialisation():
    config = GPTConfig(5000, 16, n_layer=2, n_head=2, n_embd=64)
    model = build_model(config)
    weight = model.embed[0].lut.weight
    assert weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert weight.abs().max() > 3 * 64**-0.5  # not uniform
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert not module.bias.any()
    square = [p for p in model.parameters() if p.shape == (64, 64)]
    assert len({p[0, 0].item() for p in square}) == len(square) == 8


# The whole, and its parts --------------------------------------------------


def test_forward_gives_hidden_states_causal_without_a_mask():
    model = make_model(31, **TINY).eval()
    tokens = torch.randint(31, (2, 6))
    expected = model.decode(tokens, subsequent_mask(6))
    assert model.decode(tokens).equal(expected)
    assert expected.shape == (2, 6, 12)
    assert model(tokens).equal(expected)
    assert model.generator(expected).equal(model.log_probs(tokens))
    # a mask may also consist of integers
    everything = torch.ones(1, 6, 6, dtype=torch.uint8)
    assert model.decode(tokens, everything.tril()).equal(expected)
    assert not model.decode(tokens, everything).allclose(expected)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        *[(a, "relu") for a in (F.relu, nn.ReLU())],
        *[(a, "gelu") for a in (F.gelu, nn.GELU())],
        *[(a, "gelu_tanh") for a in (nn.GELU("tanh"), "gelu_tanh")],
    ],
)
def test_parts_are_injected(activation, name):
    model = make_model(
        31, **TINY, norm=nn.LayerNorm, activation=activation, max_len=9
    )
    assert model.block_size == 9
    assert model.config.activation == name
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 2 * 2 + 1
    x = torch.randn(1, 1, 12)
    ff = model.decoder.layers[1].feed_forward.eval()
    functions = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": nn.GELU("tanh")}
    torch.testing.assert_close(ff(x), ff.w_2(functions[name](ff.w_1(x))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 0}, "n_embd"),
        ({"d_ff": -1}, "n_inner"),
        ({"max_len": -1}, "block_size"),
        ({"N": 0}, "n_layer"),
        ({"dropout": 1.5}, "dropout"),
        *[
            ({"activation": a}, "activation must be one of")
            for a in (torch.tanh, "tanh", nn.Tanh())
        ],
        ({"activation": type("MyGELU", (nn.GELU,), {})()}, "activation must"),
    ],
)
def test_an_impossible_argument_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(31, **TINY | arguments)


# Recorded answers of the public originals


def assert_golden(found, expected):
    assert (found - expected).abs().max().item() < 1e-5


def annotated_original(weights, pe, sizes, **parts):
    names = ("vocab_size", "N", "d_model", "d_ff", "h")
    model = annotated.make_model(*(sizes[name] for name in names), **parts)
    assert_golden(model.embed[1].pe[:, :24], pe)
    model.load_state_dict(weights | {"embed.1.pe": model.embed[1].pe})
    return model.eval()


@pytest.mark.parametrize("keep_attn", [False, True])
def test_the_annotated_style_has_the_numbers_of_its_original(
    golden, keep_attn
):
    weights, expected, sizes = golden("annotated")
    model = annotated_original(weights, expected["pe"], sizes)
    tokens = expected["tokens"]
    attention = model.decoder.layers[0].self_attn
    attention.keep_attn = keep_attn

    hidden = model.decode(tokens, subsequent_mask(tokens.size(1)))
    assert_golden(hidden, expected["decode"])
    assert_golden(model.log_probs(tokens), expected["log_probs"])
    if keep_attn:
        assert_golden(attention.attn, expected["attention.0"])

    log_probs = model.log_probs(tokens[:, :-1])
    loss = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
    loss.backward()
    names = [k for k in expected if k.startswith("grad.")]
    assert len(names) == 2
    for name in names:
        parameter = model.get_parameter(name.removeprefix("grad."))
        assert_golden(parameter.grad, expected[name])


def test_the_other_style_has_the_numbers_of_the_annotated_original(golden):
    weights, expected, sizes = golden("annotated")
    model = annotated_original(weights, expected["pe"], sizes, max_len=24)
    state = annotated.to_gpt2(model)
    other = mingpt_style.from_gpt2(state, model.config).eval()
    found = other.log_probs(expected["tokens"])
    # the norms differ in their eps, which explains a gap of this size
    assert (found - expected["log_probs"]).abs().max() < 1e-3
    same = annotated.from_gpt2(state, model.config, norm=annotated.LayerNorm)
    found = same.eval().log_probs(expected["tokens"])
    assert_golden(found, expected["log_probs"])
