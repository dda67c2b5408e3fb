"""Text is generated: greedy, padded, streamed, on a CPU; mistakes raise."""

import copy
import math

import pytest
import torch
from both_styles import STYLES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_duet import GPTConfig, generate, load_tokenizer, mingpt_style
from gpt_duet.generation import (
    Sampler,
    TextStream,
    optimize_for_decoding,
    stream_tokens,
)
from gpt_duet.generation.cpu_decoding import TokenLinear
from gpt_duet.running.context import few_threads
from gpt_duet.testing.strategies import random_model, random_tokens, seeds

CONFIG = GPTConfig(
    vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.5
)


@pytest.fixture(scope="module", params=STYLES)
def model(request):
    return random_model(STYLES[request.param], CONFIG)


class Table(nn.Module):
    """A language model whose next token depends only on the last one."""

    def __init__(self, log_probs):
        super().__init__()
        self.register_buffer("table", log_probs)
        self.vocab_size, self.block_size = len(log_probs), 4
        self.config = CONFIG.replace(vocab_size=self.vocab_size, block_size=4)

    def log_probs(self, tokens):
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.table[tokens]


def uniform():
    return Table(torch.zeros(5, 5).log_softmax(-1))


# The generated tokens ------------------------------------------------------


def test_greedy_is_argmax_of_the_last_position(model):
    tokens = torch.tensor([[1, 2, 3], [3, 0, 7]])
    want = tokens
    model.eval()
    for _ in range(12):  # past the block size, the window slides
        best = model.log_probs(want[:, -8:])[:, -1].argmax(-1)
        want = torch.cat([want, best[:, None]], dim=1)
    got = generate(model.train(), tokens, 12)
    assert got.tolist() == want.tolist()
    assert got.shape == (2, 15)
    assert got.dtype == torch.long


@settings(max_examples=20)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, 10), min_size=1, max_size=11),
        min_size=1,
        max_size=4,
    )
)
def test_each_row_of_a_padded_batch_is_its_prompt_alone(model, prompts):
    new = torch.stack([*stream_tokens(model, prompts, 6)], dim=1)
    for prompt, row in zip(prompts, new.tolist(), strict=True):
        alone = generate(model, torch.tensor([prompt]), 6)
        assert alone.tolist() == [prompt + row]


def test_a_model_with_next_log_probs_runs_its_head_once(model, monkeypatch):
    def refuse(_tokens):
        raise AssertionError("log_probs was called")

    monkeypatch.setattr(model, "log_probs", refuse)
    assert generate(model, torch.tensor([[1, 2]]), 2).shape == (1, 4)


def test_any_integer_dtype_works_and_no_new_token_is_a_copy(model):
    tokens = torch.tensor([[1, 2, 3]])
    want = generate(model, tokens, 3)
    for dtype in (torch.int16, torch.int32, torch.uint8):
        assert generate(model, tokens.to(dtype), 3).equal(want)
    generate(model, tokens, 0)[0, 0] = 4
    assert tokens.tolist() == [[1, 2, 3]]


# Modes and random numbers --------------------------------------------------


def test_every_part_gets_its_mode_back(model, monkeypatch):
    def modes():
        return [module.training for module in model.modules()]

    model.train()
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).eval()
    before = modes()
    assert {*before} == {True, False}
    stream = stream_tokens(model, [[1], [2, 3]], 3)
    for _ in range(2):  # stop between two tokens
        assert next(stream).shape == (2,)
        assert modes() == before
        assert torch.is_grad_enabled()
    monkeypatch.setattr(model, "log_probs", lambda _tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the model's next step raises
        next(stream)
    assert modes() == before


def test_a_seed_makes_sampling_reproducible(model):
    def draw(seed):
        drawing = torch.Generator().manual_seed(seed)
        start = torch.zeros(1, 1, dtype=torch.long)
        rows = generate(model, start, 30, temperature=1.0, generator=drawing)
        return rows.tolist()

    before = torch.random.get_rng_state()
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert torch.random.get_rng_state().equal(before)


# Refused arguments ---------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature .* -0.1"),
        ({"temperature": math.inf}, "temperature .* inf"),
        ({"top_k": 0}, "top_k .* 0"),
        ({"top_p": 0.0}, r"top_p .*\(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p .*\(0, 1\], got 1.01"),
        ({"top_p": math.nan}, "top_p .* nan"),
        ({"new_token_count": -1}, "new_token_count .* -1"),
    ],
)
def test_a_setting_outside_its_range_is_refused(settings, message):
    arguments = {"new_token_count": 1} | settings
    with pytest.raises(ValueError, match=message):
        generate(uniform(), torch.tensor([[1]]), **arguments)
    with pytest.raises(ValueError, match=message):
        stream_tokens(uniform(), [[1]], **arguments)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("function", "tokens", "message"),
    [
        (generate, torch.tensor([[1, 5]]), "id 5 .*vocabulary of 5"),
        (generate, torch.tensor([[1, -1]]), "id -1 .*vocabulary of 5"),
        (stream_tokens, [[1], [7]], "id 7 of prompt 1 .*of 5"),
        (generate, torch.ones(2, 0).long(), r"tokens of shape \(2, 0\)"),
        (generate, torch.ones(0, 2).long(), r"empty: .*shape \(0, 2\)"),
        (stream_tokens, [[1], []], "prompt 1 is empty"),
        (stream_tokens, [], "at least one prompt, got 0"),
        (generate, torch.ones(3).long(), r"int64 of shape \(3,\)"),
        (generate, torch.ones(1, 3), r"float32 of shape \(1, 3\)"),
        (generate, torch.ones(1, 3).bool(), r"bool of shape \(1, 3\)"),
        (stream_tokens, [[1, 2.7]], "float32 of shape"),
        (stream_tokens, [[1], [2.0]], "float32 of shape"),
        (stream_tokens, [[True]], "bool of shape"),
        (generate, [[1, 2], [3]], "got list; stream_tokens"),
    ],
)
def test_an_invalid_prompt_is_refused(function, tokens, message):
    with pytest.raises(ValueError, match=message):
        function(uniform(), tokens, 1)


def test_tokens_on_another_device_than_the_model_are_refused(model):
    tokens = torch.zeros(1, 3, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="on meta, the model is on cpu"):
        generate(model, tokens, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_of_nan_is_named(temperature):
    model = Table(torch.full((5, 5), math.nan))
    with pytest.raises(ValueError, match=r"row 0 .* nan"):
        generate(model, torch.tensor([[1]]), 1, temperature=temperature)


# Streamed text -------------------------------------------------------------


@given(st.lists(st.binary(max_size=5), max_size=8))
def test_a_stream_of_bytes_is_the_text_of_all_of_them(chunks):
    tokenizer = load_tokenizer("bytes")
    stream = TextStream(tokenizer)
    parts = [stream.feed(list(chunk)) for chunk in chunks]
    assert "".join(parts) + stream.close() == tokenizer.decode(
        list(b"".join(chunks))
    )


@pytest.mark.slow
@given(st.text(max_size=20))
def test_no_piece_of_a_text_is_half_a_character(text):
    stream = TextStream(load_tokenizer("bytes"))
    pieces = [stream.feed([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert stream.close() == ""


# The distribution of the next token, and draws from it


LOG_PROBS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 99}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 1.0}, [0.5, 0.25, 0.125, 0.125]),
        # top_k leaves 2/3 and 1/3, of which the first exceeds 0.6
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [8 / 11, 2 / 11, 0.5 / 11, 0.5 / 11]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
        ({"temperature": 5e-324}, [1, 0, 0, 0]),
        ({"temperature": 1e300}, [0.25, 0.25, 0.25, 0.25]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_and_top_k_set_the_distribution(settings, kept, dtype):
    sampler = Sampler(**{"temperature": 1.0} | settings)
    got = sampler.probabilities(LOG_PROBS.to(dtype))
    want = torch.tensor([kept], dtype=dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_top_k_keeps_k_even_of_equals():
    got = Sampler(1.0, top_k=2).probabilities(torch.zeros(1, 5))
    assert sorted(got[0].tolist()) == [0, 0, 0, 0.5, 0.5]


def test_greedy_and_top_1_take_the_first_of_equals():
    scores = torch.tensor([[0, 2, 2, 1, 2], [1.0, 0, 1, 1, 0]])
    scores = scores.log_softmax(-1)
    for sampler in (Sampler(), Sampler(1.0, top_k=1), Sampler(1e9, top_k=1)):
        assert sampler.choose(scores).tolist() == [1, 0]


def test_half_precision_is_sampled_in_single():
    got = Sampler(1.0).probabilities(LOG_PROBS.bfloat16())
    assert got.dtype == torch.float32


def test_draws_follow_the_distribution():
    sampler, drawing = Sampler(0.7, top_k=3), torch.Generator().manual_seed(1)
    drawn = sampler.choose(LOG_PROBS.repeat(20_000, 1), drawing)
    counts = torch.bincount(drawn, minlength=4)
    expected = 20_000 * sampler.probabilities(LOG_PROBS)[0]
    kept = expected > 0
    assert counts[~kept].sum() == 0
    # chi-square with two degrees of freedom: chance exceeds 24 in 6e-6 of runs
    assert ((counts - expected) ** 2 / expected)[kept].sum() < 24


# Linear layers that read one token use other kernels, with equal results


class Products(TorchDispatchMode):
    """A mode that records shapes of matrix products, and the use of oneDNN."""

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
    # sums of up to 24 products near 1 are rounded in another order
    bound = 1e-13 if dtype == torch.float64 else 0.1
    assert ((got - want).abs() < bound).all()


@pytest.mark.parametrize(
    ("threads", "parts"), [(1, 1), (2, 2), (3, 3), (5, 4), (8, 6)]
)
def test_one_token_is_split_into_a_product_for_each_thread(threads, parts):
    layer = nn.Linear(12, 5)
    optimize_for_decoding(layer)
    with few_threads(0, 0, threads), Products() as products:
        layer(torch.randn(1, 1, 12))
    assert products.shapes == [(parts, 1, 12 // parts)]


@pytest.mark.filterwarnings("error")
def test_short_floats_avoid_onednn_only_for_one_token():
    layer = nn.Linear(12, 5, dtype=torch.bfloat16)
    optimize_for_decoding(layer)
    assert layer.weight.is_contiguous()
    for tokens, expected in ((1, False), (3, True)):
        with torch.no_grad(), Products() as products:
            layer(torch.randn(1, tokens, 12, dtype=torch.bfloat16))
        assert products.onednn == [expected]
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, 4, dtype=torch.bfloat16))  # width 4, not 12
    assert torch.backends.mkldnn.enabled


def test_layers_of_a_subclass_are_unchanged():
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
