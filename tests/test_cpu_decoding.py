"""Linear layers that read a single token: the same numbers, other kernels."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import random_model, random_tokens, seeds
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mingpt_style
from shared import GPTConfig, generate
from shared.generation import optimize_for_decoding
from shared.generation.cpu_decoding import TokenLinear
from shared.invariants.model.threads import few_threads


class Products(TorchDispatchMode):
    """Notes the shape of what is multiplied, and whether oneDNN may."""

    def __init__(self):
        super().__init__()
        self.shapes, self.onednn = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default:
            self.shapes.append(tuple(args[0].shape))
        if func is torch.ops.aten.addmm.default:
            self.onednn.append(torch.backends.mkldnn.enabled)
        return func(*args, **(kwargs or {}))


@given(st.data())
@settings(max_examples=60)
def test_a_linear_layer_for_one_token_is_the_same_layer(data):
    inputs, outputs = (data.draw(st.integers(1, 24)) for _ in range(2))
    bias = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float64, torch.bfloat16]))
    shape = data.draw(st.sampled_from([(), (1,), (1, 1), (1, 3), (2, 0)]))
    with torch.random.fork_rng():
        torch.manual_seed(data.draw(seeds))
        layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
        x = torch.randn(*shape, inputs, dtype=dtype)
    want = layer(x)
    optimize_for_decoding(layer)
    assert type(layer) is TokenLinear
    with few_threads(0, 0, data.draw(st.integers(1, 4))):
        got = layer(x)
    assert got.shape == want.shape == (*shape, outputs)
    assert got.dtype == dtype
    # products of 24 numbers near one, rounded in another order
    bound = 1e-13 if dtype == torch.float64 else 0.1
    assert ((got - want).abs() < bound).all()


@pytest.mark.parametrize(
    ("threads", "parts"), [(1, 1), (2, 2), (3, 3), (5, 4), (8, 6)]
)
def test_one_token_is_a_batch_of_products_one_for_each_thread(threads, parts):
    layer = nn.Linear(12, 5)
    optimize_for_decoding(layer)
    with few_threads(0, 0, threads), Products() as products:
        layer(torch.randn(1, 1, 12))
    assert products.shapes == [(parts, 1, 12 // parts)]


def test_short_floats_leave_onednn_for_one_token_alone():
    layer = nn.Linear(12, 5, dtype=torch.bfloat16)
    optimize_for_decoding(layer)
    assert layer.weight.is_contiguous()
    for tokens, expected in ((1, False), (3, True)):
        with torch.no_grad(), Products() as products:
            layer(torch.randn(1, tokens, 12, dtype=torch.bfloat16))
        assert products.onednn == [expected]
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, 4, dtype=torch.bfloat16))  # 12, but no token
    assert torch.backends.mkldnn.enabled


def test_layers_of_a_class_of_their_own_stay():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(2, 3), nn.Linear(3, 2))
    optimize_for_decoding(model)
    assert [type(layer) for layer in model] == [Own, TokenLinear]


@pytest.mark.parametrize("tied", [False, True])
def test_optimizing_for_decoding_changes_nothing_but_the_order(tied):
    config = GPTConfig(13, 12, 2, 2, 16, tie_weights=tied)
    model = random_model(mingpt_style, config)
    before = copy.deepcopy(model)
    optimize_for_decoding(model)
    weight = model.transformer.h[0].attn.c_attn.weight
    assert weight.shape == (48, 16)
    assert weight.stride() == (1, 48)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    for name, tensor in before.state_dict().items():
        assert tensor.equal(model.state_dict()[name])
    tokens = random_tokens(config, 2, 12)
    torch.testing.assert_close(
        model.log_probs(tokens), before.log_probs(tokens)
    )
    prompt = tokens[:1, :3]
    assert generate(model, prompt, 9).equal(generate(before, prompt, 9))
