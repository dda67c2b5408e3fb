"""A wrong setting is found in each precision: live, and in a recording."""

import numpy as np
import ported_llama
import pytest
import torch
from rows import slow_unless
from test_diff_ports import SIZES, TOKENS
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from gpt_duet import diff_by_value, record_values
from gpt_duet.comparison.values.side import Side

pytestmark = pytest.mark.unhooked


def rope(theta, **more):
    parameters = {"rope_type": "default", "rope_theta": theta, **more}
    return {"rope_parameters": parameters}


LLAMA = {
    "eps of 1e-2": {"rms_norm_eps": 1e-2},
    "eps of 1e-3": {"rms_norm_eps": 1e-3},
    "GELU for SiLU": {"hidden_act": "gelu"},
    "GELU by tanh for SiLU": {"hidden_act": "gelu_pytorch_tanh"},
    "ReLU for SiLU": {"hidden_act": "relu"},
    "theta of 500,000": rope(500_000.0),
    "theta of 20,000": rope(20_000.0),
    "positions halved": rope(10_000.0, rope_type="linear", factor=2.0),
}
GPT2 = {
    "ReLU for GELU": {"activation_function": "relu"},
    "eps of LayerNorm": {"layer_norm_epsilon": 1e-3},
    # in 16 bits, rounding is larger than the effect of these faults
    "exact GELU": {"activation_function": "gelu"},
    "GELU by a sigmoid": {"activation_function": "quick_gelu"},
}
HIDDEN = {*GPT2} - {"ReLU for GELU", "eps of LayerNorm"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build(llama=True, kind="sdpa", **settings):
    """Return a model with small fresh weights, which hide the most faults."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 29, "attn_implementation": kind, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    if llama:
        config = LlamaConfig(
            **sizes, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            **{"rms_norm_eps": 1e-5, **settings},
        )  # fmt: skip
        return LlamaForCausalLM(config)
    config = GPT2Config(
        **sizes, n_positions=16, n_layer=2, n_head=4, n_embd=32,
        tie_word_embeddings=False, **settings,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def compare(left, right, dtype, way, folder, **more):
    if way == "live":
        return diff_by_value(left, right, TOKENS, dtype=dtype, **more)
    path = folder / "right.safetensors"
    record_values(right, TOKENS, path, dtype=dtype)
    return diff_by_value(left, path)


def rows():
    for name in (*LLAMA, *GPT2):
        for dtype in DTYPES:
            for way in ("live", "recording"):
                wide = dtype == torch.float32 or way == "live"
                quick = dtype == torch.bfloat16 and way == "recording"
                slow = [] if quick else pytest.mark.slow
                if wide or name not in HIDDEN:
                    yield pytest.param(name, dtype, way, marks=slow)


@pytest.mark.parametrize(("name", "dtype", "way"), [*rows()], ids=str)
def test_a_wrong_setting_is_found(name, dtype, way, tmp_path):
    llama = name in LLAMA
    right = build(llama, **(LLAMA if llama else GPT2)[name])
    found = compare(build(llama), right, dtype, way, tmp_path)
    assert not found.same, found.sentence


SOUND = ("sdpa", "eager", "Fused", "Written")


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("way", ["live", "recording"])
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(d, marks=[] if d is torch.bfloat16 else pytest.mark.slow)
        for d in DTYPES
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "right", slow_unless(lambda right: right in SOUND[:2], SOUND)
)
def test_a_sound_model_is_not_accused(right, dtype, way, large, tmp_path):
    llama = right != "Written"
    left = build(llama)
    other = build(llama, "eager" if right == "eager" else "sdpa")
    for parameter in (*left.parameters(), *other.parameters()) * large:
        generator = torch.Generator().manual_seed(parameter.numel())
        shift = 1.0 if parameter.ndim == 1 else 0.0
        torch.nn.init.normal_(parameter, shift, 0.3, generator)
    if hasattr(ported_llama, right):
        other = getattr(ported_llama, right)(other.state_dict(), SIZES)
    found = compare(left, other, dtype, way, tmp_path)
    assert found.same, found.sentence


@pytest.mark.parametrize(
    ("way", "dtype", "most"),
    [
        # the most calls that each model gets: to learn how to call it, to
        # record it, and to nudge its weights
        ("live", None, (3, 2)),
        # in float32, also the calls in float64 that measure the rounding
        ("live", torch.float32, (5, 3)),
        ("recording", torch.float32, (4, 2)),
        ("array", None, (4, 2)),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"hidden_act": "gelu"}], ids=str)
def test_each_side_is_called_a_few_times_at_one_shape(
    way, dtype, most, settings, tmp_path, monkeypatch
):
    calls = {True: [], False: []}
    forward = LlamaForCausalLM.forward

    def counted(self, input_ids=None, **more):
        calls[self.left].append(tuple(input_ids.shape))
        return forward(self, input_ids, **more)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    left, right = build(), build(**settings).eval()
    left.left, right.left = True, False

    def array(ids):
        with torch.no_grad():
            return right(torch.as_tensor(np.asarray(ids))).logits.numpy()

    if way == "array":
        found = diff_by_value(left, array, TOKENS, vocab_size=29, quick=True)
        assert found.only_scores
    else:
        compare(left, right, dtype, way, tmp_path, quick=True)
    # the kit looks for the time axis only if the models differ
    shapes = [s for side in calls.values() for s in side if s[0] == 1]
    assert {*shapes} == {tuple(torch.as_tensor(TOKENS).reshape(1, -1).shape)}
    for side, bound in zip(calls.values(), most, strict=True):
        assert 0 < len([s for s in side if s[0] == 1]) <= bound
        assert len(side) <= bound + 3 * bool(settings)


def test_values_that_are_too_many_are_computed_again(monkeypatch):
    left, right = build(), build(hidden_act="gelu")
    kept = diff_by_value(left, right, TOKENS)
    monkeypatch.setattr(Side, "most", 99)
    assert str(diff_by_value(left, right, TOKENS)) == str(kept)


class TimeFirst(torch.nn.Module):
    """A model that takes tokens as (time, batch), which nothing declares."""

    vocab_size = 29

    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(29, 8)
        self.head = torch.nn.Linear(8, 29)
        self.scale = scale

    def forward(self, tokens):
        return self.head(self.table(tokens).cumsum(0) * self.scale)


def test_a_differing_model_with_time_first_is_refused():
    assert diff_by_value(TimeFirst(), TimeFirst(), TOKENS).same
    with pytest.raises(ValueError, match="mixes the first axis"):
        diff_by_value(TimeFirst(), TimeFirst(2.0), TOKENS)
