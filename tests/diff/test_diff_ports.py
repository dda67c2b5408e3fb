"""Ports of Llama and GPT-2: faulty lines are found; sound ports agree."""

from collections import Counter
from types import SimpleNamespace

import ported_llama
import pytest
import torch
from planted_faults import expected_lines, plant, read_faults
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from gpt_duet import diff_by_value
from gpt_duet.comparison.values.weights import describe, match_weights

pytestmark = pytest.mark.unhooked

SIZES = SimpleNamespace(vocab_size=29, n_layer=2)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

# "==" begins the faults of a port; ">" marks the first line that shows a
# fault.
TABLE = r"""
== tests/zoo/ported_llama.py Meta
* norm without its weight
- return x * root * weight
+ return x * root
* plus one
- return x * root * weight
+ return x * root * (1 + weight)
* eps left out
- + 1e-5)
+ )
* last norm without its weight
- x = self.norm(x, self.w["model/norm/weight"])
+ x = self.norm(x, torch.ones(32).to(x))
* another base of the rotation
- speeds = 10_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
+ speeds = 20_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
> ported_llama.py: turned = pairs * turns[:, None]
* rotated the other way
- turned = pairs * turns[:, None]
+ turned = pairs * turns[:, None].conj()
* keys not rotated
- k = self.rotate(k)
+ pass
> ported_llama.py: scores = q @ k.transpose(2, 3)
* halves where neighbours are meant
- pairs = torch.view_as_complex(single.unflatten(-1, (-1, 2)))
+ pairs = torch.complex(*single.chunk(2, -1))
> ported_llama.py: turned = pairs * turns[:, None]
* keys tiled
- k = k.repeat_interleave(times, 2)
+ k = k.repeat(1, 1, times, 1)
* values tiled
- v = v.repeat_interleave(times, 2)
+ v = v.repeat(1, 1, times, 1)
* no scale
- scores = scores / math.sqrt(8)
+ scores = scores / 1.0
> ported_llama.py: scores = scores + mask
* scaled by the width
- scores = scores / math.sqrt(8)
+ scores = scores / math.sqrt(32)
* mask one off
- diagonal=1)
+ diagonal=2)
> ported_llama.py: scores = scores + mask
* no mask
- scores = scores + mask
+ scores = scores + 0
> ported_llama.py: weights = F.softmax(scores, dim=-1)
* softmax over the queries
- weights = F.softmax(scores, dim=-1)
+ weights = F.softmax(scores, dim=-2)
* heads not turned back
- y = y.transpose(1, 2).reshape(batch, time, width)
+ y = y.reshape(batch, time, width)
> ported_llama.py: return y @ w["self_attn/o_proj/weight"].T
* gelu for silu
- F.silu(gate) * up
+ F.gelu(gate) * up
* gate and up swapped
- F.silu(gate) * up
+ F.silu(up) * gate
* residual from the normed stream
- h = x + self.attention(w, n)
+ h = n + self.attention(w, n)
* second norm takes the first one's weight
- n = self.norm(h, w["post_attention_layernorm/weight"])
+ n = self.norm(h, w["input_layernorm/weight"])
* embedding scaled
- x = F.embedding(ids, self.w["model/embed_tokens/weight"])
+ x = 32**0.5 * F.embedding(ids, self.w["model/embed_tokens/weight"])

== tests/zoo/ported_llama.py Fused
* parts in another order
- q, k, v = qkv.split([width, width // 2, width // 2], -1)
+ k, q, v = qkv.split([width // 2, width, width // 2], -1)
* keys and values swapped
- q, k, v = qkv.split([width, width // 2, width // 2], -1)
+ q, v, k = qkv.split([width, width // 2, width // 2], -1)
> ported_llama.py: turned = torch.cat([-second, first], -1)
* turned without its sign
- turned = torch.cat([-second, first], -1)
+ turned = torch.cat([second, first], -1)
* sign of the other half
- turned = torch.cat([-second, first], -1)
+ turned = torch.cat([second, -first], -1)
* sine and cosine swapped
- return x * cos + turned * sin
+ return x * sin + turned * cos
* another base
- speeds = 10_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
+ speeds = 500_000.0 ** -(torch.arange(0, 8, 2).double() / 8)
* keys tiled
- k = k.repeat_interleave(2, 1)
+ k = k.repeat(1, 2, 1, 1)
* values tiled
- v = v.repeat_interleave(2, 1)
+ v = v.repeat(1, 2, 1, 1)
* not causal
- F.scaled_dot_product_attention(q, k, v, is_causal=True)
+ F.scaled_dot_product_attention(q, k, v)
* another scale
- q, k, v, is_causal=True)
+ q, k, v, is_causal=True, scale=1 / 8)
* heads not turned back
- y = y.transpose(1, 2).reshape(batch, time, width)
+ y = y.reshape(batch, time, width)
> ported_llama.py: return F.linear(y, w["self_attn/o_proj/weight"])
* gate and up swapped
- gate, up = F.linear(x, w["gate_up"]).chunk(2, -1)
+ up, gate = F.linear(x, w["gate_up"]).chunk(2, -1)
> ported_llama.py: return F.linear(F.silu(gate) * up
* relu
- F.silu(gate) * up
+ F.relu(gate) * up
* eps too small
- weight, 1e-5)
+ weight, 1e-6)
* head of the embedding
- F.linear(x, self.w["lm_head/weight"])
+ F.linear(x, self.w["model/embed_tokens/weight"])

== tests/zoo/ported_llama.py Written
* spread of a sample
- unbiased=False)
+ unbiased=True)
* shift left out
- return gain * normed + shift
+ return gain * normed
* constant of GELU
- 0.044715
+ 0.44715
* half left out
- return 0.5 * x * (1 + torch.tanh(
+ return x * (1 + torch.tanh(
* scaled by the width
- keys.shape[-1] ** 0.5
+ x.shape[-1] ** 0.5
* mask hides the present
- torch.triu(torch.ones(time, time), diagonal=1)
+ torch.triu(torch.ones(time, time), diagonal=0).tril(8)
> ported_llama.py: scores.masked_fill_(mask, -torch.inf)
* no bias of values
- x @ weight[2] + bias[2]
+ x @ weight[2]
* keys and queries swapped
- scores = queries @ keys.transpose(2, 3)
+ scores = keys @ queries.transpose(2, 3)
* heads cut the wrong way round
- values = values.view(batch, time, self.heads, 8).transpose(1, 2)
+ values = values.view(batch, time, 8, self.heads).permute(0, 3, 1, 2)
> ported_llama.py: y = (weights @ values).transpose(1, 2)
* position one off
- places[torch.arange(ids.size(1))]
+ places[torch.arange(1, ids.size(1) + 1)]

== tests/zoo/ported_llama.py NeoX
* all of the head rotated
- heads, size, rotated = 4, 16, 4
+ heads, size, rotated = 4, 16, 16
> ported_llama.py: part = self.turn(part, angles.cos(), angles.sin())
* parts not head by head
- q, k, v = qkv.transpose(1, 2).chunk(3, -1)
+ q, k, v = qkv.view(batch, time, 3, 4, 16).permute(2, 0, 3, 1, 4)
* another base of a part
- speeds = 10_000.0 ** -(torch.arange(0, n, 2).double() / n)
+ speeds = 500_000.0 ** -(torch.arange(0, n, 2).double() / n)
> ported_llama.py: angles = torch.arange(x.size(2)).double()[:, None] * speeds
"""
PORTS = ("Meta", "Fused", "Written", "NeoX")
FAULTS = read_faults(TABLE)


def original(port, kind, dtype=torch.float64):
    """Return the transformers model of a port; its weights hide no fault."""
    if port == "Written":
        config = GPT2Config(
            vocab_size=29, n_positions=16, n_layer=2, n_head=4, n_embd=32,
            bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
            attn_implementation=kind,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    elif port == "NeoX":
        config = GPTNeoXConfig(
            vocab_size=29, hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, rotary_pct=0.25,
            bos_token_id=None, eos_token_id=None, attn_implementation=kind,
        )  # fmt: skip
        model = GPTNeoXForCausalLM(config)
    else:
        config = LlamaConfig(
            vocab_size=29, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
            attn_implementation=kind,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    # draw all weights again: versions of transformers drew them differently
    torch.manual_seed(0)
    for parameter in model.parameters():
        shift = 1.0 if parameter.ndim == 1 else 0.0
        torch.nn.init.normal_(parameter, shift, 0.3)
    return model.to(dtype)


def port_of(module, port, left):
    weights = {
        # the name in older versions of transformers
        name.replace("embed_out.", "lm_head."): tensor
        for name, tensor in left.state_dict().items()
    }
    return getattr(module, port)(weights, SIZES)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("port", PORTS)
def test_sound_ports_are_one_function(port, kind):
    left = original(port, kind)
    right = port_of(ported_llama, port, left)
    for sides in ((left, right), (right, left)):
        found = diff_by_value(*sides, TOKENS)
        assert found.same, found.sentence


QUICK = {
    *("no mask", "keys tiled", "parts in another order", "no scale"),
    *("all of the head rotated", "parts not head by head"),
}
CAUSES = {
    "no scale": "2.828 is the root of 8: is a factor 1 / sqrt(8) missing?",
    "embedding scaled": "5.657 is the root of 32",
    "plus one": "they differ by its input: 1 + weight on one side?",
}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, marks=[] if f.name in QUICK else pytest.mark.slow)
        for f in FAULTS
    ],
    ids=str,
)
def test_a_fault_in_a_port_is_named(fault, kind, tmp_path):
    """The three lines shown, or their caller, include the faulty line."""
    port, left = fault.within, original(fault.within, kind)
    module, target = plant(fault, tmp_path)
    found = diff_by_value(left, port_of(module, port, left), TOKENS)
    assert not found.same, found.sentence
    file, lines = expected_lines(fault, target)
    places = found.parted.shown
    assert len(places) <= 3
    shown = [(place.path, place.line) for place in places]
    shown.append((found.parted.right.caller or ())[:2])
    assert {(str(file), line) for line in lines} & {*shown}, found.sentence
    assert CAUSES.get(fault.name, "") in found.sentence
    # a fault in which the left repeats heads in another order
    repeated = "tiled" in fault.name
    assert ("in another order" in found.sentence) == repeated, found.sentence
    assert not repeated or shown[0][1] in lines, found.sentence


KINDS = {
    "Meta": {"equal": 17, "halves interleaved": 4},
    "Fused": {"equal": 11, "joined": 4},
    "Written": {"equal": 29},
    "NeoX": {"equal": 28},
}


@pytest.mark.parametrize("port", PORTS)
def test_weights_are_matched_and_gradients_equal(port):
    left = original(port, "sdpa")
    right = port_of(ported_llama, port, left)
    found = diff_by_value(left, right, TOKENS, gradients=True)
    assert Counter(match.how for match in found.weights) == KINDS[port]
    assert found.same, found.sentence
    assert f", {sum(KINDS[port].values())} gradients equal" in found.sentence


def test_fresh_norms_are_told_apart_by_name_order_or_value():
    """All norms start as ones, so values do not tell them apart."""
    config = LlamaConfig(
        vocab_size=29, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    for right in (llama, port_of(ported_llama, "Fused", llama)):
        found = diff_by_value(llama, right, TOKENS, gradients=True)
        assert found.same, found.sentence
        assert " gradients equal" in found.sentence


def test_a_weight_may_have_each_layout():
    left, right = nn.Module(), nn.Module()
    a, b, v = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6)
    for module, weights in (
        (left, {"a": a, "b": b, "v": v, "w": v + 1}),
        (
            right,
            {
                "same": a, "turned": a.T, "shuffled": a[[1, 0, 2, 3, 5, 4]],
                "fused": torch.cat([b, a]),
                "turned_fused": torch.cat([b.T, a.T], 1),
                "cut": b[:2], "rounded": a.bfloat16().float(), "zero": 0 * a,
                "biases": torch.cat([v, v + 1]), "bias": v[:3],
                "other": b + 1e-3,
            },
        ),
    ):  # fmt: skip
        for name, weight in weights.items():
            module.register_parameter(name, nn.Parameter(weight.clone()))
    found = {match.name: match for match in match_weights(left, right)}
    hows = {name: match.how for name, match in found.items()}
    assert hows == {
        "same": "equal", "turned": "transposed",
        "shuffled": "rows in another order", "fused": "joined",
        "turned_fused": "joined", "cut": "part", "zero": "zero",
        "rounded": "equal, rounded to bfloat16", "biases": "joined",
        "bias": "part", "other": "absent",
    }  # fmt: skip
    assert found["fused"].sources == ("b", "a")
    sentence = describe([*found.values()])
    assert "10 of 11 of the right's are on the left" in sentence
    assert "other is nowhere on the left: nearest b, 0.001 apart" in sentence


def test_weights_rounded_to_bfloat16_are_reported_first():
    left = original("Fused", "sdpa", torch.float32)
    right = original("Fused", "sdpa", torch.float32)
    right.to(torch.bfloat16).to(torch.float32)
    found = diff_by_value(left, right, TOKENS)
    assert not found.same
    assert "equal, rounded to bfloat16" in found.weights_sentence
    assert "rounded to bfloat16" in found.sentence
