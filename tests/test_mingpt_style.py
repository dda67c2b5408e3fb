"""Faithful to its style: initialisation, loss, names."""

import math

import pytest
import torch
from strategies import random_tokens

from mingpt_style import GPT
from shared.config import GPTConfig

SMALL = GPTConfig(17, 12, n_layer=2, n_head=2, n_embd=16)


@pytest.mark.unhooked
def test_targets_of_another_shape_are_refused():
    idx = random_tokens(SMALL, 2, 4)
    with pytest.raises(ValueError, match=r"\(4, 2\) for tokens .* \(2, 4\)"):
        GPT(SMALL)(idx, idx.t())


def test_initialisation_is_that_of_gpt2():
    config = GPTConfig(500, 100, n_layer=8, n_head=2, n_embd=128)
    tied = GPT(config.replace(tie_weights=True))
    assert {*dict(tied.named_parameters())} < {*tied.state_dict()}
    for name, p in [*GPT(config).named_parameters(), *tied.named_parameters()]:
        if name.endswith("bias"):
            assert not p.any()
        elif ".ln_" in name:
            assert (p == 1).all()
        else:
            scaled = name.endswith("c_proj.weight")
            std = 0.02 / math.sqrt(2 * 8) if scaled else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < std / 10, name


def test_parameter_names_are_those_of_minGPT_and_no_buffer_is_kept():
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc",
             "mlp.c_proj")  # fmt: skip
    layers = [*(f"h.0.{part}" for part in parts), "ln_f"]
    model = GPT(SMALL.replace(n_layer=1))
    assert list(model.state_dict()) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *(f"transformer.{x}.{k}" for x in layers for k in ("weight", "bias")),
        "lm_head.weight",
    ]
    assert list(model.buffers()) == []


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168)],
)
def test_gpt2_has_its_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = GPT(GPTConfig.preset(name))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_an_empty_batch_gives_an_empty_answer():
    logits, _ = GPT(SMALL)(torch.zeros(0, 5, dtype=torch.long))
    assert logits.shape == (0, 5, 17)
