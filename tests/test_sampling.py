"""What the next token is drawn from, and that draws follow it."""

import math

import pytest
import torch
from strategies import random_model

import mingpt_style
from shared import GPTConfig, generate
from shared.generation import Sampler

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
    want = torch.tensor([kept], dtype=dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_top_k_keeps_k_even_of_equals():
    got = Sampler(1.0, top_k=2).probabilities(torch.zeros(1, 5))
    assert sorted(got[0].tolist()) == [0, 0, 0, 0.5, 0.5]


def test_of_equals_the_first_is_taken_by_greedy_and_by_top_1():
    scores = torch.tensor([[0, 2, 2, 1, 2], [1.0, 0, 1, 1, 0]])
    scores = scores.log_softmax(-1)
    for sampler in (Sampler(), Sampler(1.0, top_k=1), Sampler(1e9, top_k=1)):
        assert sampler.choose(scores).tolist() == [1, 0]


def test_half_precision_is_sampled_in_single():
    got = Sampler(1.0).probabilities(LOG_PROBS.bfloat16())
    assert got.dtype == torch.float32


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
    config = GPTConfig(11, 8, n_layer=2, n_head=2, n_embd=16)
    model = random_model(mingpt_style, config)
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
