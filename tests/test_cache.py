"""Decoding with a cache: the same function, each token read once."""

import copy
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import configs, random_state, random_tokens, seeds
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import annotated
import mingpt_style
from shared import GPTConfig, generate
from shared.generation import (
    generate_rows,
    optimize_for_decoding,
    stream_tokens,
)
from shared.generation.cpu_decoding import TokenLinear
from shared.protocol import CachedLanguageModel

CONFIG = GPTConfig(
    vocab_size=13, block_size=12, n_layer=2, n_head=2, n_embd=16, dropout=0.3
)


def pair(config=CONFIG, seed=0, dtype=torch.float64):
    """Both styles from one set of weights."""
    state = random_state(config, seed, dtype)
    return [
        style.from_gpt2(state, config).eval()
        for style in (annotated, mingpt_style)
    ]


class Uncached:
    """The same model, its cache out of sight."""

    def __init__(self, model):
        self.config, self.log_probs = model.config, model.log_probs
        self.vocab_size = model.vocab_size
        self.block_size = model.block_size


@given(st.data())
@settings(max_examples=40)
def test_any_pieces_equal_the_full_forward(data):
    config = data.draw(configs())
    model = pair(config, data.draw(seeds))[1]
    batch = data.draw(st.integers(1, 4))
    tokens = random_tokens(config, batch, config.block_size, data.draw(seeds))
    cuts = data.draw(st.sets(st.integers(1, config.block_size)))
    bounds = sorted({0, *cuts, config.block_size})
    cache = model.init_cache(batch)
    pieces = [model.decode(tokens[:, a:b], cache) for a, b in pairwise(bounds)]
    got = torch.cat(pieces, dim=1)
    want = model.log_probs(tokens)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-11


@given(st.data())
@settings(max_examples=25)
def test_cached_uncached_and_the_other_style_write_the_same(data):
    config = data.draw(configs(min_embd=4))
    other, model = pair(config, data.draw(seeds))
    time = data.draw(st.integers(1, config.block_size + 3))
    tokens = random_tokens(config, data.draw(st.integers(1, 3)), time)
    count = config.block_size + 4  # the window fills up, and slides
    cached = generate(model, tokens, count)
    assert cached.equal(generate(Uncached(model), tokens, count))
    assert cached.equal(generate(other, tokens, count))


def test_sampling_draws_the_same_with_and_without_a_cache():
    model = pair()[1]
    tokens = random_tokens(CONFIG, 3, 5)

    def sample(model):
        drawing = torch.Generator().manual_seed(7)
        return generate(
            model, tokens, 30, temperature=1.0, top_k=5, generator=drawing
        )

    rows = sample(model)
    assert rows.equal(sample(Uncached(model)))
    assert len(rows.unique(dim=0)) == 3


def test_each_token_is_read_once_until_the_window_slides(monkeypatch):
    model = pair()[1]
    read = []
    hidden = model.hidden

    def counted(idx, cache=None):
        read.append(idx.size(1))
        return hidden(idx, cache)

    monkeypatch.setattr(model, "hidden", counted)
    generate(model, random_tokens(CONFIG, 1, 4), 11)
    # the prompt, one token at a time to the block's end, then whole windows
    assert read == [4, *[1] * 8, 12, 12]


def test_prompts_of_different_lengths_do_without():
    model = pair()[1]
    prompts = [[1], [2, 3, 4], [5, 6]]
    rows = generate_rows(model, prompts, 14)
    for row, prompt in zip(rows, prompts, strict=True):
        assert generate(model, torch.tensor([prompt]), 14)[0].tolist() == row


def test_streams_of_one_model_do_not_share_a_cache():
    model = pair()[1]
    alone = [
        [int(token) for token in stream_tokens(model, [prompt], 9)]
        for prompt in ([1, 2], [3, 4])
    ]
    streams = [stream_tokens(model, [p], 9) for p in ([1, 2], [3, 4])]
    turns = [[int(a), int(b)] for a, b in zip(*streams, strict=True)]
    assert [list(column) for column in zip(*turns, strict=True)] == alone


def test_a_cache_has_room_for_the_block_from_the_start():
    model = pair()[1]
    cache = model.init_cache(3)
    assert len(cache) == CONFIG.n_layer
    places = [past.k.data_ptr() for past in cache]
    for past in cache:
        assert past.k.shape == past.v.shape == (3, 2, 12, 8)
        assert past.k.dtype == torch.float64
    model.decode(random_tokens(CONFIG, 3, 12), cache)
    assert [past.k.data_ptr() for past in cache] == places
    assert [past.length for past in cache] == [12, 12]


def test_a_full_cache_refuses_more():
    model = pair()[1]
    cache = model.init_cache(1)
    tokens = random_tokens(CONFIG, 1, 9)
    model.decode(tokens, cache)
    with pytest.raises(ValueError, match=r"13 tokens .* 12 positions"):
        model.decode(tokens[:, :4], cache)
    # the refusal left the cache as it was
    tail = random_tokens(CONFIG, 1, 3, seed=1)
    want = model.log_probs(torch.cat([tokens, tail], dim=1))[:, -3:]
    torch.testing.assert_close(model.decode(tail, cache), want)


@pytest.mark.parametrize(("rows", "given"), [(3, 1), (1, 3)])
def test_a_cache_for_other_rows_is_refused(rows, given):
    model = pair()[1]
    with pytest.raises(ValueError, match=f"for {rows} rows, got {given}"):
        model.decode(random_tokens(CONFIG, given, 2), model.init_cache(rows))


def test_who_has_a_cache():
    other, model = pair()
    assert isinstance(model, CachedLanguageModel)
    # `decode` is this school's word for all below the generator
    assert not isinstance(other, CachedLanguageModel)


def test_no_graph_is_kept():
    model = pair()[1].train()
    cache = model.init_cache(1)
    out = model.decode(random_tokens(CONFIG, 1, 3), cache)
    assert not out.requires_grad
    assert not cache[0].k.requires_grad


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
    with few_threads(data.draw(st.integers(1, 4))):
        got = layer(x)
    assert got.shape == want.shape == (*shape, outputs)
    assert got.dtype == dtype
    # products of 24 numbers near one, rounded in another order
    bound = 1e-13 if dtype == torch.float64 else 0.1
    assert ((got - want).abs() < bound).all()


@contextmanager
def few_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_one_token_is_a_batch_of_products_one_for_each_thread():
    layer = nn.Linear(12, 5)
    optimize_for_decoding(layer)
    for threads, parts in ((1, 1), (2, 2), (3, 3), (5, 4), (8, 6)):
        with few_threads(threads), Products() as products:
            layer(torch.randn(1, 1, 12))
        assert products.shapes == [(parts, 1, 12 // parts)]


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
    config = CONFIG.replace(tie_weights=tied)
    model = mingpt_style.from_gpt2(random_state(config), config).eval()
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
    assert generate(model, tokens[:1, :3], 9).equal(
        generate(before, tokens[:1, :3], 9)
    )
