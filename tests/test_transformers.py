"""Parity with transformers' GPT2LMHeadModel, with random weights."""

import pytest
import torch
from strategies import random_tokens
from transformers import GPT2Config, GPT2LMHeadModel

from gpt_duet.config import GPTConfig

ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


def pair(activation="gelu_tanh", tie_weights=True):
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_inner": 48}
    config = GPTConfig(
        29, 16, activation=activation, tie_weights=tie_weights, **sizes
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=29,
            n_positions=16,
            activation_function=ACTIVATIONS[activation],
            tie_word_embeddings=tie_weights,
            bos_token_id=None,
            eos_token_id=None,
            **sizes,
        )
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return config, model


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tie_weights", [True, False])
def test_logits_agree_to_rounding(style, activation, tie_weights):
    config, theirs = pair(activation, tie_weights)
    ours = style.from_gpt2(theirs.state_dict(), config).eval()
    tokens = random_tokens(config, 3, 16)
    with torch.no_grad():
        single = theirs(tokens).logits.log_softmax(-1)
        found = ours.log_probs(tokens)
        double = theirs.double()(tokens).logits.log_softmax(-1)
        ours = style.from_gpt2(theirs.state_dict(), config).eval()
        exact = ours.log_probs(tokens)
    rounding = (single - double).abs().max()
    assert (found - single).abs().max() <= 4 * rounding + 1e-6
    # transformers' tanh GELU and torch's are one function to rounding
    assert (exact - double).abs().max() < 1e-10


def test_what_a_style_writes_transformers_reads(style):
    config, theirs = pair(tie_weights=False)
    tokens = random_tokens(config, 3, 16)
    with torch.no_grad():
        expected = theirs(tokens).logits
    state = style.to_gpt2(style.from_gpt2(theirs.state_dict(), config))
    assert not state.pop("lm_head.bias", torch.zeros(1)).any()
    head = state.pop("lm_head.weight")
    state = {f"transformer.{k}": v for k, v in state.items()}
    with torch.no_grad():
        for p in theirs.parameters():
            p.zero_()
    theirs.load_state_dict(state | {"lm_head.weight": head}, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, expected)
