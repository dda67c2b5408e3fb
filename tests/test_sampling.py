"""What the next token is drawn from, and that draws follow it."""

import pytest
import torch

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


def test_draws_follow_the_distribution():
    sampler, drawing = Sampler(0.7, top_k=3), torch.Generator().manual_seed(1)
    drawn = sampler.choose(LOG_PROBS.repeat(20_000, 1), drawing)
    counts = torch.bincount(drawn, minlength=4)
    expected = 20_000 * sampler.probabilities(LOG_PROBS)[0]
    kept = expected > 0
    assert counts[~kept].sum() == 0
    # chi-square of two degrees of freedom: above 24 by chance in 6e-6
    assert ((counts - expected) ** 2 / expected)[kept].sum() < 24
