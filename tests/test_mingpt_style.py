"""Faithful to its school: initialisation, loss, names."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import configs, random_state, random_tokens, seeds
from torch import nn

from mingpt_style import GPT, from_gpt2
from shared.config import GPTConfig

SMALL = GPTConfig(17, 12, n_layer=2, n_head=2, n_embd=16)


@given(data=st.data())
def test_the_loss_is_the_mean_cross_entropy_of_the_logits(data):
    config = data.draw(configs(dropout=0.0))
    time = data.draw(st.integers(1, config.block_size))
    seed = data.draw(seeds)
    model = from_gpt2(random_state(config, seed), config)
    idx = random_tokens(config, 3, time, seed)
    targets = random_tokens(config, 3, time, seed + 1)
    targets[0, 0] = 0
    targets[1:][torch.rand(2, time) < 0.3] = -1
    logits, loss = model(idx, targets)
    losses = [
        -F.log_softmax(logits[b, t], dim=-1)[targets[b, t]]
        for b in range(3)
        for t in range(time)
        if targets[b, t] != -1
    ]
    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_the_logits_do_not_depend_on_the_targets():
    model = GPT(SMALL).eval()
    idx = random_tokens(SMALL, 2, 7)
    logits, loss = model(idx)
    assert loss is None
    assert logits.shape == (2, 7, 17)
    assert model(idx, idx)[0].equal(logits)
    assert model.log_probs(idx).equal(F.log_softmax(logits, dim=-1))


def test_targets_need_not_be_contiguous():
    model = GPT(SMALL).eval()
    data = random_tokens(SMALL, 2, 8)
    idx, targets = data[:, :-1], data[:, 1:]
    assert not targets.is_contiguous()
    loss = model(idx, targets)[1]
    assert loss.equal(model(idx.contiguous(), targets.contiguous())[1])
    transposed = random_tokens(SMALL, 7, 2).t()
    assert model(idx, transposed)[1].isfinite()


def test_initialisation_is_that_of_gpt2():
    config = GPTConfig(500, 100, n_layer=8, n_head=2, n_embd=128)
    model = GPT(config)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif ".ln_" in name:
            assert (p == 1).all()
        else:
            scaled = name.endswith("c_proj.weight")
            std = 0.02 / math.sqrt(2 * 8) if scaled else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < std / 10, name


def test_parameter_names_are_those_of_the_school():
    model = GPT(SMALL.replace(n_layer=1))
    assert list(model.state_dict()) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.ln_1.bias",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.attn.c_proj.bias",
        "transformer.h.0.ln_2.weight",
        "transformer.h.0.ln_2.bias",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_fc.bias",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.h.0.mlp.c_proj.bias",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168)],
)
def test_gpt2_has_its_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = GPT(GPTConfig.preset(name))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_a_tied_head_learns_with_the_table():
    model = GPT(SMALL.replace(tie_weights=True))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.2)
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in model.state_dict()


def test_the_stream_is_the_sum_of_its_parts():
    model = from_gpt2(random_state(SMALL), SMALL).eval()
    block = model.transformer.h[0]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    middle = x + block.attn(block.ln_1(x))
    torch.testing.assert_close(
        block(x), middle + block.mlp(block.ln_2(middle))
    )


def test_no_buffer_and_no_mask_is_kept():
    assert list(GPT(SMALL).buffers()) == []


def test_an_empty_batch_gives_an_empty_answer():
    logits, _ = GPT(SMALL)(torch.zeros(0, 5, dtype=torch.long))
    assert logits.shape == (0, 5, 17)


def test_it_learns_by_heart():
    model = GPT(SMALL.replace(dropout=0.0))
    data = random_tokens(SMALL, 2, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(data[:, :-1], data[:, 1:])[1].item()
    for _ in range(60):
        loss = model(data[:, :-1], data[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first == pytest.approx(math.log(17), abs=0.2)
    assert loss.item() < 0.3


def test_every_parameter_learns():
    model = GPT(SMALL)
    idx = random_tokens(SMALL, 4, 12)
    model(idx, idx)[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert isinstance(p, nn.Parameter)
        assert p.grad.any(), name


@pytest.mark.unhooked
def test_targets_of_another_shape_are_refused():
    idx = random_tokens(SMALL, 2, 4)
    with pytest.raises(ValueError, match=r"\(4, 2\) for tokens .* \(2, 4\)"):
        GPT(SMALL)(idx, idx.t())
