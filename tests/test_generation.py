"""Generation: greedy, sampled, padded, streamed, and what it refuses."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared import GPTConfig, generate, load_tokenizer
from shared.checkpoint import convert
from shared.comparison.styles import enlarged_random_weights
from shared.generation import (
    Sampler,
    TextStream,
    eval_mode,
    generate_rows,
    stream_tokens,
)
from shared.generation.reading import last_log_probs
from shared.protocol import load_style

STYLES = ("annotated", "mingpt_style")
CONFIG = GPTConfig(
    vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.5
)


def build(style: str, seed: int = 0, scale: float = 8.0):
    """Both styles from one set of weights, large enough to have opinions."""
    state = enlarged_random_weights(load_style("mingpt_style"), CONFIG, seed)
    state = {name: (scale * t).double() for name, t in state.items()}
    return load_style(style).from_gpt2(state, CONFIG)


@pytest.fixture(scope="module", params=STYLES)
def model(request):
    return build(request.param)


class Table(nn.Module):
    """A language model whose next token depends on the last one only."""

    def __init__(self, log_probs, block_size=4):
        super().__init__()
        self.register_buffer("table", log_probs)
        self.vocab_size = len(log_probs)
        self.block_size = block_size
        self.config = CONFIG.replace(
            vocab_size=self.vocab_size, block_size=block_size
        )
        self.seen = []

    def log_probs(self, tokens):
        self.seen.append(tuple(tokens.shape))
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.table[tokens]


def uniform(vocab=5, block_size=4):
    return Table(torch.zeros(vocab, vocab).log_softmax(-1), block_size)


# What comes out ------------------------------------------------------------


def test_greedy_is_argmax_of_the_last_position(model):
    tokens = torch.tensor([[1, 2, 3], [3, 0, 7]])
    want = tokens
    model.eval()
    for _ in range(12):  # past the block size: the window slides
        best = model.log_probs(want[:, -8:])[:, -1].argmax(-1)
        want = torch.cat([want, best[:, None]], dim=1)
    got = generate(model.train(), tokens, 12)
    assert got.tolist() == want.tolist()
    assert got.shape == (2, 15)
    assert got.dtype == torch.long


@given(
    st.integers(0, 50),
    st.lists(st.integers(0, 10), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_float64_greedy_is_the_same_in_both_styles(seed, prompt, count):
    ours = generate(build("annotated", seed=seed), torch.tensor([prompt]), 4)
    theirs = build("mingpt_style", seed=seed)
    assert ours.equal(generate(theirs, torch.tensor([prompt]), 4))
    back = convert(convert(theirs, "annotated"), "mingpt_style")
    assert generate(back, torch.tensor([prompt]), count).equal(
        generate(theirs, torch.tensor([prompt]), count)
    )


@given(
    st.lists(
        st.lists(st.integers(0, 10), min_size=1, max_size=11),
        min_size=1,
        max_size=4,
    )
)
def test_each_row_of_a_padded_batch_is_its_prompt_alone(prompts):
    for style in STYLES:
        model = build(style).eval()
        together = generate_rows(model, prompts, 6)
        for prompt, row in zip(prompts, together, strict=True):
            alone = generate(model, torch.tensor([prompt]), 6)
            assert row == alone[0].tolist()


def test_padding_does_not_change_a_log_probability(model):
    rows = torch.tensor(
        [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 0, 0, 0, 0] + 4 * [0]]
    )
    rows[1, 3:] = 10  # what lies behind the end must not matter
    with torch.no_grad():
        model.eval()
        got = last_log_probs(model, rows, [9, 3])
        full = model.log_probs(rows[:1, 1:9])[0, -1]
        short = model.log_probs(rows[1:, :3])[0, -1]
    torch.testing.assert_close(got[0], full, rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], short, rtol=0, atol=1e-12)


def test_the_window_is_never_longer_than_the_block():
    model = uniform(block_size=4)
    generate(model, torch.tensor([[1, 2, 3]]), 5)
    assert model.seen == [(1, 3), (1, 4), (1, 4), (1, 4), (1, 4)]
    model.seen.clear()
    generate_rows(model, [[1] * 7, [2]], 3)
    assert model.seen == [(2, 4)] * 3


def test_a_model_with_next_log_probs_runs_its_head_once(model, monkeypatch):
    def refuse(_tokens):
        raise AssertionError("log_probs was called")

    monkeypatch.setattr(model, "log_probs", refuse)
    assert generate(model, torch.tensor([[1, 2]]), 2).shape == (1, 4)


def test_no_new_tokens_is_a_copy():
    tokens = torch.tensor([[1, 2]])
    got = generate(uniform(), tokens, 0)
    got[0, 0] = 4
    assert tokens.tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_any_integer_ids_will_do(dtype, model):
    tokens = torch.tensor([[1, 2, 3]])
    want = generate(model, tokens, 3)
    assert generate(model, tokens.to(dtype), 3).equal(want)


# Modes ---------------------------------------------------------------------


def test_every_part_gets_its_mode_back(model):
    model.train()
    part = next(m for m in model.modules() if isinstance(m, nn.Dropout))
    part.eval()
    generate(model, torch.tensor([[1]]), 2)
    assert model.training
    assert not part.training
    with pytest.raises(ValueError, match="11"):
        generate(model, torch.tensor([[11]]), 2)
    assert model.training
    model.eval()
    generate(model, torch.tensor([[1]]), 1)
    assert not any(m.training for m in model.modules())


def test_the_mode_comes_back_after_an_error_inside():
    model = uniform().train()

    def fail(_tokens):
        raise RuntimeError("inside")

    model.log_probs = fail
    with pytest.raises(RuntimeError, match="inside"):
        generate(model, torch.tensor([[1]]), 2)
    assert model.training


def test_a_stream_leaves_mode_and_gradients_alone_between_tokens():
    model = uniform().train()
    stream = stream_tokens(model, [[1], [2, 3]], 3)
    for new in stream:
        assert model.training
        assert torch.is_grad_enabled()
        assert new.shape == (2,)
        break
    stream.close()
    assert model.training


def test_eval_mode_takes_what_is_no_module():
    with eval_mode(lambda tokens: tokens):
        pass


# Sampling ------------------------------------------------------------------


def test_a_seed_makes_sampling_reproducible(model):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.zeros(1, 1, dtype=torch.long)
        return generate(
            model, tokens, 30, temperature=1.0, generator=generator
        ).tolist()

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_a_generator_leaves_the_global_random_state_alone(model):
    before = torch.random.get_rng_state()
    generate(
        model,
        torch.tensor([[1]]),
        3,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    assert torch.random.get_rng_state().equal(before)


# The statistic's expected value is the number of degrees of freedom, its
# standard deviation sqrt(2 * dof): five of them are past 1e-5 by chance.
def chi_square(counts, probs):
    expected = probs * counts.sum()
    used = expected > 0
    assert counts[~used].sum() == 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    dof = int(used.sum()) - 1
    return statistic.item(), dof + 5 * math.sqrt(2 * dof)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.5, None, None), (1.0, 3, None), (1.0, None, 0.6)],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    model = build("mingpt_style", scale=3.0).eval()
    prompt = torch.tensor([[4, 1, 6]])
    draws = generate(
        model,
        prompt.repeat(20_000, 1),
        1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(1),
    )[:, -1]
    counts = torch.bincount(draws, minlength=11).double()
    with torch.no_grad():
        p = model.log_probs(prompt)[0, -1].exp() ** (1 / temperature)
    p /= p.sum()
    ranked = p.sort(descending=True)
    if top_k is not None:
        p[ranked.indices[top_k:]] = 0
    if top_p is not None:
        needed = int((ranked.values.cumsum(0) < top_p).sum()) + 1
        assert 1 < needed < 11
        p[ranked.indices[needed:]] = 0
    statistic, limit = chi_square(counts, p / p.sum())
    assert statistic < limit
    # and the test can fail: another distribution is far outside
    statistic, limit = chi_square(counts, torch.full((11,), 1 / 11).double())
    assert statistic > 10 * limit


def test_the_chi_square_of_a_wrong_temperature_fails():
    probs = torch.tensor([0.6, 0.3, 0.1]).double()
    draws = Sampler(2.0).choose(
        probs.log().expand(20_000, 3), torch.Generator().manual_seed(0)
    )
    counts = torch.bincount(draws, minlength=3).double()
    statistic, limit = chi_square(counts, probs)
    assert statistic > limit


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
        # of two thirds and one third the first reaches 0.6 alone
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [8 / 11, 2 / 11, 0.5 / 11, 0.5 / 11]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
        ({"temperature": 5e-324}, [1, 0, 0, 0]),
        ({"temperature": 1e300}, [0.25, 0.25, 0.25, 0.25]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_drawn_from(settings, kept, dtype):
    sampler = Sampler(**{"temperature": 1.0} | settings)
    got = sampler.probabilities(LOG_PROBS.to(dtype))
    torch.testing.assert_close(
        got, torch.tensor([kept]).to(dtype), rtol=0, atol=1e-6
    )


def test_top_k_keeps_k_even_of_equals():
    got = Sampler(1.0, top_k=2).probabilities(torch.zeros(1, 5))
    assert sorted(got[0].tolist()) == [0, 0, 0, 0.5, 0.5]


def test_half_precision_is_sampled_in_single():
    got = Sampler(1.0).probabilities(LOG_PROBS.bfloat16())
    assert got.dtype == torch.float32


# What is refused -----------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature .* -0.1"),
        ({"temperature": math.nan}, "temperature .* nan"),
        ({"temperature": math.inf}, "temperature .* inf"),
        ({"top_k": 0}, "top_k .* 0"),
        ({"top_k": -1}, "top_k .* -1"),
        ({"top_k": True}, "top_k .* True"),
        ({"top_p": 0.0}, r"top_p .*\(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p .*\(0, 1\], got 1.01"),
        ({"top_p": math.nan}, "top_p .* nan"),
        ({"new_token_count": -1}, "new_token_count .* -1"),
        ({"new_token_count": True}, "new_token_count .* True"),
    ],
)
def test_bad_numbers(settings, message):
    arguments = {"new_token_count": 1} | settings
    with pytest.raises(ValueError, match=message):
        generate(uniform(), torch.tensor([[1]]), **arguments)
    with pytest.raises(ValueError, match=message):
        stream_tokens(uniform(), [[1]], **arguments)


def test_ids_outside_the_vocabulary():
    with pytest.raises(ValueError, match=r"id 5 .*vocabulary of 5"):
        generate(uniform(), torch.tensor([[1, 5]]), 1)
    with pytest.raises(ValueError, match=r"id -1 .*vocabulary of 5"):
        generate(uniform(), torch.tensor([[1, -1]]), 1)
    with pytest.raises(ValueError, match=r"id 7 of prompt 1 .*of 5"):
        stream_tokens(uniform(), [[1], [7]], 1)


def test_empty_prompts():
    with pytest.raises(ValueError, match=r"empty: tokens of shape \(2, 0\)"):
        generate(uniform(), torch.zeros(2, 0, dtype=torch.long), 1)
    with pytest.raises(ValueError, match=r"shape \(0, 2\)"):
        generate(uniform(), torch.zeros(0, 2, dtype=torch.long), 1)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate_rows(uniform(), [[1], []], 1)
    with pytest.raises(ValueError, match="at least one prompt, got 0"):
        generate_rows(uniform(), [], 1)


@pytest.mark.unhooked
def test_what_is_no_batch_of_ids():
    with pytest.raises(ValueError, match=r"int64 of shape \(3,\)"):
        generate(uniform(), torch.zeros(3, dtype=torch.long), 1)
    with pytest.raises(ValueError, match=r"float32 of shape \(1, 3\)"):
        generate(uniform(), torch.zeros(1, 3), 1)
    with pytest.raises(ValueError, match=r"got list; generate_rows"):
        generate(uniform(), [[1, 2], [3]], 1)


def test_tokens_on_another_device_than_the_model(model):
    tokens = torch.zeros(1, 3, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="on meta, the model is on cpu"):
        generate(model, tokens, 1)


def test_a_model_that_excludes_tokens_is_sampled():
    excluded = torch.tensor([[0.5, 0.5, 0.0]]).log().expand(3, 3)
    for temperature in (0.1, 1.0, 1e30):
        rows = generate(
            Table(excluded),
            torch.zeros(500, 1).long(),
            1,
            temperature=temperature,
        )
        assert set(rows[:, -1].tolist()) == {0, 1}


def test_a_model_of_nan_is_named():
    model = Table(torch.full((5, 5), math.nan))
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"row 0 .* nan"):
            generate(model, torch.tensor([[1]]), 1, temperature=temperature)


def test_the_cpu_is_assumed_where_there_are_no_parameters():
    assert generate_rows(copy.copy(uniform()), [[1]], 1) == [[1, 0]]


# Text as it comes ----------------------------------------------------------


@given(st.lists(st.binary(max_size=5), max_size=8))
def test_a_stream_of_bytes_is_the_text_of_all_of_them(chunks):
    tokenizer = load_tokenizer("bytes")
    stream = TextStream(tokenizer)
    parts = [stream.feed(list(chunk)) for chunk in chunks]
    assert "".join(parts) + stream.close() == tokenizer.decode(
        list(b"".join(chunks))
    )


@given(st.text(max_size=20))
def test_no_piece_of_a_text_is_half_a_character(text):
    stream = TextStream(load_tokenizer("bytes"))
    pieces = [stream.feed([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert stream.close() == ""


def test_a_half_character_is_held_back_and_then_marked():
    stream = TextStream(load_tokenizer("bytes"))
    euro = "€".encode()
    assert stream.feed(euro[:2]) == ""
    assert stream.feed(euro[2:]) == "€"
    assert stream.feed(euro[:2]) == ""
    assert stream.close() == "\ufffd"
    with pytest.raises(ValueError, match="256"):
        stream.feed([256])
