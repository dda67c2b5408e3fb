"""Lines are paired by their computed values, up to the first difference.

Some differences, such as two swapped norms, do not show in one text or with
fresh weights. Their tests are in test_diff_scope.py. Faults of ports are in
test_diff_ports.py, and faults planted in a style are in zoo/planted_faults.py.
"""

import copy
import json
import linecache
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import known_gpts
import ported_gpt
import pytest
import third_style
import torch
import torch.nn.functional as F
from planted_faults import FAULTS, ROOT, expected_lines, plant
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from gpt_duet import annotated, assert_same_values, diff_by_value, mingpt_style
from gpt_duet.agreement import enlarged_random_weights
from gpt_duet.checkpoint.other_layouts import with_prefix
from gpt_duet.config import GPTConfig

# the shape checks wrap each call, so their frames and operations would be
# recorded like those of the model
pytestmark = pytest.mark.unhooked

CONFIG = GPTConfig(29, 16, n_layer=2, n_head=4, n_embd=32, norm_eps=1e-5)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture(scope="module")
def weights():
    state = enlarged_random_weights(mingpt_style, CONFIG, 0)
    return {name: tensor.double() for name, tensor in state.items()}


def transformers_gpt2(state, kind):
    config = GPT2Config(
        vocab_size=29, n_positions=16, n_layer=2, n_head=4, n_embd=32,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
        attn_implementation=kind,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.load_state_dict(with_prefix(state))
    return model.to(state["wte.weight"].dtype)


MODELS = {
    "annotated": lambda state: annotated.from_gpt2(state, CONFIG),
    "mingpt_style": lambda state: mingpt_style.from_gpt2(state, CONFIG),
    "eager": lambda state: transformers_gpt2(state, "eager"),
    "sdpa": lambda state: transformers_gpt2(state, "sdpa"),
    "nanoGPT": lambda state: known_gpts.nano(state, CONFIG),
    "minGPT": lambda state: known_gpts.nano(state, CONFIG, known_gpts.MinGPT),
    "scratch": lambda state: known_gpts.scratch(state, CONFIG),
    "ported": lambda state: ported_gpt.Ported(state, CONFIG),
    "einsum": lambda state: third_style.from_gpt2(state, CONFIG),
}


def build(name, weights, dtype=torch.float64):
    return MODELS[name]({k: v.to(dtype) for k, v in weights.items()})


def paired(found):
    """Return the code of the lines of each pair, in the order of the run."""
    return [(pair.left.code, pair.right.code) for pair in found.pairs]


# --- One function -----------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "dtype"),
    [
        *[(m, torch.float64) for m in MODELS if m != "mingpt_style"],
        *[(m, torch.float32) for m in ("annotated", "eager", "ported")],
    ],
    ids=str,
)
def test_two_equal_models_are_one_function(right, dtype, weights):
    left = build("mingpt_style", weights, dtype)
    found = diff_by_value(left, build(right, weights, dtype), TOKENS)
    assert found.same, found.sentence
    assert found.sentence.startswith(f"one function: {len(found.pairs)} ")
    # one pair for each sum, norm, projection and activation of two layers
    assert len(found.pairs) >= 30
    assert {pair.left.layer for pair in found.pairs} == {None, 0, 1}
    for pair in found.pairs:
        assert len({pair.left.layer, pair.right.layer} - {None}) < 2, pair
        assert pair.difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("left", ["annotated", "mingpt_style", "sdpa"])
def test_correct_pairs_are_one_function(left, dtype, weights):
    single = {name: tensor.float() for name, tensor in weights.items()}
    for right in MODELS:
        pair = (MODELS[name](single) for name in (left, right))
        found = diff_by_value(*pair, TOKENS, dtype=dtype)
        assert found.same, found.sentence


def test_the_pairs_of_both_styles(weights):
    found = diff_by_value(
        build("annotated", weights), build("mingpt_style", weights), TOKENS
    )
    pairs = paired(found)
    for left, right in (
        ("self.lut(x) * math.sqrt(self.d_model)", "self.transformer.wte(idx)"),
        ("self.pe[:, : x.size(1)]", "self.transformer.wpe(pos)"),
        ("self.norm(x)", "self.ln_1(x)"),
        ("linear(x)", "self.c_attn(x).split(C, dim=2)"),
        ("self.activation(self.w_1(x))", "self.act(self.c_fc(x))"),
        ("self.proj(x)", "self.lm_head(self.hidden(tokens))"),
    ):
        assert (left, right) in pairs
    assert pairs.count(("linear(x)", "self.c_attn(x).split(C, dim=2)")) == 6
    kernel = {
        pair.left.code: pair.right.inside
        for pair in found.pairs
        if pair.right.op == "scaled_dot_product_attention"
    }
    assert kernel == {
        "query / math.sqrt(d_k) @ key.transpose(-2, -1)": "scaled scores",
        'scores.masked_fill_(mask == 0, float("-inf"))': "masked scores",
        "scores.softmax(dim=-1)": "probabilities",
        "weights @ value": "",
    }
    assert not any(line.right for line in found.alone["left"])
    assert not any(line.left for line in found.alone["right"])
    alone = {line.place.code: line.why for line in found.alone["left"]}
    why = alone["self.lut(x)"]
    assert re.fullmatch(
        rf"equals a result of mingpt_style/.* times 1/\u221a{CONFIG.n_embd}",
        why,
    )
    fused = {line.place.code: line.why for line in found.alone["right"]}
    assert list(fused) == ["self.c_attn(x)"]
    why = fused["self.c_attn(x)"]
    assert re.fullmatch(r"on the way to .*:\d+ `.*split.*`", why)


def test_single_heads_pair_with_batched_heads(weights):
    found = diff_by_value(
        build("mingpt_style", weights), build("ported", weights), TOKENS
    )
    heads = [p for p in found.pairs if p.right.code == "q @ k.mT"]
    assert [(p.left.inside, p.left.layer) for p in heads] == [
        (f"query @ key, head {head}", layer)
        for layer in range(2)
        for head in range(4)
    ]
    # the line occurs once, because the lines of equal layers are folded
    assert str(found).count("q @ k.mT") == 1
    assert "4 of 1\u00d712\u00d712" in str(found)


def test_rows_of_a_batch_and_a_factory(weights):
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    built = []

    def factory():
        built.append(1)
        return build("annotated", weights)

    found = diff_by_value(factory, build("eager", weights), tokens)
    assert found.same, found.sentence
    assert len(found.pairs) >= 30
    assert len(built) == 1  # a slow loader runs only once


def test_models_and_random_state_are_left_as_they_were(weights):
    model = build("annotated", weights).train()
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    diff_by_value(model, model, TOKENS)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


# --- The first difference ---------------------------------------------------

QUICK = ("exact GELU", "mask one off", "constant of GELU", "a layer skipped")


def test_every_fault_has_its_place():
    assert len(FAULTS) > 30
    for fault in FAULTS:
        source = (ROOT / fault.file).read_text()
        assert source.count(fault.old) == 1, fault


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, marks=[] if f.name in QUICK else pytest.mark.slow)
        for f in FAULTS
    ],
    ids=str,
)
def test_a_fault_is_named(fault, weights, tmp_path):
    module, target = plant(fault, tmp_path)
    state, config = weights, CONFIG
    if fault.file.startswith("annotated/layers"):
        config = replace(CONFIG, norm_eps=1e-30)
        good = mingpt_style.from_gpt2(state, config)
        bad = module.from_gpt2(state, config, norm=module.LayerNorm)
    elif fault.file.startswith("tests"):
        good = mingpt_style.from_gpt2(state, config)
        bad = module.Ported(mingpt_style.to_gpt2(good), config)
    else:
        state = state | {"lm_head.bias": torch.arange(29.0).double() / 7}
        other = mingpt_style if "annotated" in fault.file else annotated
        good = other.from_gpt2(state, config)
        bad = module.from_gpt2(state, config)
    found = diff_by_value(good, bad, TOKENS)
    file, lines = expected_lines(fault, target)
    assert not found.same
    assert found.parted.right.path == str(file), found.sentence
    assert found.parted.right.line in lines, found.sentence
    assert found.parted.layer == fault.layer, found.sentence
    assert f"{file.name}:{found.parted.right.line} `" in found.sentence
    layer = "" if fault.layer is None else f", layer {fault.layer}: "
    assert layer in found.sentence


def transposed(block):
    weight = block.attn.c_proj.weight
    weight.data = weight.data.mT.contiguous()


IN_ONE_LAYER = {
    "transposed": (transposed, "self.c_proj(y)"),
    "a fresh norm": (
        lambda block: block.ln_2.reset_parameters(),
        "self.ln_2(x)",
    ),
    "other heads": (
        lambda block: setattr(block.attn, "n_head", 2),
        "F.scaled_dot_product_attention",
    ),
    "one weight": (
        lambda block: block.mlp.c_fc.weight.data[7, 5].add_(1e-3),
        "self.c_fc(x)",
    ),
}


@pytest.mark.parametrize(
    ("change", "line"), IN_ONE_LAYER.values(), ids=IN_ONE_LAYER
)
@pytest.mark.parametrize(
    "faulty", ["right", pytest.param("left", marks=pytest.mark.slow)]
)
def test_a_fault_in_one_layer(change, line, faulty, weights):
    good, bad = build("eager", weights), build("mingpt_style", weights)
    change(bad.transformer.h[1])
    sides = (bad, good) if faulty == "left" else (good, bad)
    found = diff_by_value(*sides, TOKENS)
    place = getattr(found.parted, faulty)
    assert place.code.startswith(line), found.sentence
    assert place.layer == found.parted.layer == 1
    assert place.file.startswith("mingpt_style/")
    assert "in another order" not in found.sentence


@pytest.mark.parametrize("style", [annotated, mingpt_style])
def test_small_weights_hide_no_fault(style):
    """With small weights, two GELUs differ by only 1e-6, and the residual
    sums by only 1e-8."""
    torch.manual_seed(0)
    state = mingpt_style.to_gpt2(mingpt_style.build_model(CONFIG))
    exact = replace(CONFIG, activation="gelu")
    if style is annotated:  # from_gpt2 rescales its embedding
        state = {name: tensor.double() for name, tensor in state.items()}
    found = diff_by_value(
        style.from_gpt2(state, CONFIG),
        mingpt_style.from_gpt2(state, exact),
        TOKENS,
    )
    assert found.parted.right.op == found.parted.left.op == "gelu"
    assert found.parted.layer == 0
    if style is mingpt_style:
        assert "its inputs are equal, no value" in found.sentence
    assert " 1 times " not in str(found)


def test_equality_at_one_position_excuses_no_others():
    """For any rotary base, the angle at position 0 is 0, so both models agree
    there."""
    models = []
    for theta in (10_000.0, 20_000.0):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=29, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            attn_implementation="eager", initializer_range=0.3,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )  # fmt: skip
        models.append(LlamaForCausalLM(config))
    found = diff_by_value(*models, TOKENS)
    assert "inv_freq" in found.parted.right.code, found.sentence


class Turned(nn.Module):
    """A model of two layers, with complex rotary positions and a gate."""

    vocab_size, block_size = 29, 16

    def __init__(self, act=F.silu, base=100.0, scale=2.0, normed=True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(29, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.act, self.scale, self.normed = act, scale, normed
        speeds = base ** -torch.arange(0, 1, 1 / 4)
        angles = torch.outer(torch.arange(16), speeds)
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def turn(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (4, 2)))
        turned = pairs * self.turns[: x.size(1)]
        return torch.view_as_real(turned).flatten(-2).to(x)

    def forward(self, idx):
        x = self.table(idx)
        for layer in self.layers:
            n = F.layer_norm(x, (8,)) if self.normed else x
            q, k, v = (self.scale * layer(n)).split(8, dim=2)
            x = x + (self.turn(q) @ self.turn(k).mT).tril() @ v
            x = x + 0.01 * self.act(2 * x) * v
        return x @ self.table.weight.T


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"act": torch.tanh}, "self.act(2 * x)", "the left continues at"),
        ({"base": 99.0}, "self.turns[: x.size(1)]", " apart"),
        ({"scale": 6.0}, "self.scale * layer(n)", "it is 3 times"),
        ({"normed": False}, "layer(n)", "the left continues at"),
    ],
    ids=["act", "base", "scale", "norm"],
)
def test_a_fault_next_to_complex_numbers_is_found(change, code, words):
    found = diff_by_value(Turned(), Turned(**change), TOKENS)
    assert found.parted.right.code == code, found.sentence
    assert words in found.sentence
    assert found.sentence in str(found)


def kernel(x):
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    y = F.scaled_dot_product_attention(
        heads, heads.flip(-1), heads, is_causal=True
    )
    return x + y.transpose(1, 2).flatten(2)


def looped(x, scale=2.0, future=1):
    heads = []
    for head in x.chunk(2, -1):
        scores = head @ head.flip(-1).mT
        scores = scores / scale
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(future)
        scores = scores.masked_fill(mask, -1e9)
        heads.append(scores.softmax(-1) @ head)
    return x + torch.cat(heads, -1)


def test_a_fault_in_a_loop_is_found_despite_a_kernel():
    assert diff_by_value(Toy(kernel), Toy(looped), TOKENS).same
    for change, code, words in (
        ({"scale": 4.0}, "scores / scale", "it is 0.5 times"),
        ({"future": 2}, "scores.masked_fill(mask, -1e9)", "(masked scores"),
    ):
        bad = Toy(partial(looped, **change))
        found = diff_by_value(Toy(kernel), bad, TOKENS)
        assert found.parted.right.code == code, found.sentence
        assert words in found.sentence


def test_queries_keys_and_values_do_not_count_as_layers():
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = diff_by_value(Toy(block), Toy(block), TOKENS)
    assert {pair.left.layer for pair in found.pairs} == {None}


class Listed(Turned):
    """A model whose loop takes modules from two lists, layer by layer."""

    def __init__(self):
        super().__init__()
        part = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # noqa: E731
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(
            nn.ModuleList([part(), part()]) for _ in range(3)
        )

    def forward(self, idx):
        x = self.table(idx)
        for norm, (first, second) in zip(self.norms, self.layers, strict=True):
            x = x + first(norm(x))
            x = x + second(x)
        for factor in (0.5, 0.3, 0.7):  # steps of a loop that are not layers
            x = factor * x
        return x @ self.table.weight.T


def test_a_loop_over_parts_has_layers():
    found = diff_by_value(Listed(), Listed(), TOKENS)
    before, layers, after = found.sections()
    assert (
        layers.title == "layer 0; layers 1 to 2 run the same lines; there "
        "the sides differ by 0"
    )
    lines = [row.left.code for row in layers.rows]
    assert lines[0] == "norm(x)"
    assert lines[-1] == "x + second(x)"
    assert len(lines) == 7
    assert len(before.rows) == 1
    assert [row.times for row in after.rows] == [3, 1]
    # operations that share a line have different names
    assert re.findall(r"(second\(x\)  \w+|norm\(x\)  \w+)", str(found)) == [
        *["second(x)  linear"] * 2,
        *["second(x)  tanh"] * 2,
    ]


def test_the_sentence_has_the_whole_finding(weights):
    left, right = build("annotated", weights), build("mingpt_style", weights)
    right.transformer.h[1].mlp.act = nn.GELU()
    with pytest.raises(AssertionError) as raised:
        assert_same_values(left, right, TOKENS)
    assert re.fullmatch(
        r"they first differ at mingpt_style/feed_forward\.py:\d+ `gelu`, "
        r"called from "
        r"mingpt_style/block\.py:\d+ \(mlp\), layer 1: its inputs are equal "
        r"to \de-16, no value on the left equals its output; nearest is "
        r"annotated/feed_forward\.py:\d+ `gelu` "
        r"\(decoder\.layers\.1\.feed_forward\), 0\.000\d+ apart; "
        r"scores \S+ apart; values with a counterpart: \d+ of \d+ on the "
        r"left, \d+ of \d+ on the right",
        str(raised.value),
    )
    assert_same_values(left, build("mingpt_style", weights), TOKENS)


def test_rounding_of_float32_is_not_a_fault(weights):
    """Rounding moves values by 1e-8; a wrong eps moves them by 1e-6."""
    left = build("annotated", weights, torch.float32)
    right = build("mingpt_style", weights, torch.float32)
    found = diff_by_value(left, right, TOKENS)
    assert 1e-9 < found.pairs[-1].difference < 1e-6
    right.transformer.h[1].ln_1.eps = 1e-6
    found = diff_by_value(left, right, TOKENS)
    assert found.parted.right.code == "self.ln_1(x)"
    assert found.parted.layer == 1


@pytest.mark.parametrize("large", [True, False])
def test_no_two_values_are_paired_by_chance(large):
    models = []
    for seed, style in enumerate((mingpt_style, annotated)):
        torch.manual_seed(seed)
        state = style.to_gpt2(style.build_model(CONFIG))
        if large:
            state = enlarged_random_weights(style, CONFIG, seed)
        models.append(style.from_gpt2(state, CONFIG))
    for left, right in ((0, 1), (1, 0)):
        found = diff_by_value(models[left], models[right], TOKENS)
        assert found.pairs == []
        assert found.shares_nothing
        assert "share no value" in found.sentence
        assert len(found.nearest) == 5
        near = found.sentence.partition("nearest values: ")[2]
        assert near.count(" apart") == 5


# --- The recording ----------------------------------------------------------


class Toy(nn.Module):
    """A model with an embedding, one operation and a head."""

    vocab_size, block_size = 29, 16

    def __init__(self, middle=lambda x: x):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(29, 8)
        self.head = nn.Linear(8, 29)
        self.middle = middle

    def forward(self, idx):
        return self.head(self.middle(self.table(idx)))


def fused(attend):
    def middle(x):
        parts = (x.unflatten(-1, (2, 4)).transpose(1, 2),) * 3
        return attend(*parts).transpose(1, 2).flatten(-2)

    return middle


def test_a_composite_operator_is_one_step():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def causal(score, b, h, i, j):
        return torch.where(i >= j, score, -torch.inf)

    def sound(*parts):
        return flex.flex_attention(*parts, score_mod=causal)

    def kernel(*parts):
        return F.scaled_dot_product_attention(*parts, is_causal=True)

    left = Toy(fused(kernel))
    assert diff_by_value(left, Toy(fused(sound)), [1, 2, 3]).same
    found = diff_by_value(left, Toy(fused(flex.flex_attention)), [1, 2, 3])
    assert "`flex_attention`" in found.sentence, found.sentence


def in_place(x):
    y = x * 3
    y += x.flip(1)
    y.mul_(x)
    y[:, 1:] = y[:, :-1].cumsum(1)
    return F.relu(y, inplace=True)


def out_of_place(x):
    a = 3 * x
    b = a + x.flip(1)
    c = b * x
    d = torch.cat([c[:, :1], c[:, :-1].cumsum(1)], 1)
    return d.clamp_min(0)


def test_in_place_changes_do_not_alter_recorded_values():
    found = diff_by_value(Toy(in_place), Toy(out_of_place), TOKENS)
    assert found.same
    pairs = paired(found)
    for pair in (
        ("x * 3", "3 * x"),
        ("y += x.flip(1)", "a + x.flip(1)"),
        ("y.mul_(x)", "b * x"),
    ):
        assert pair in pairs
    assert pairs[-3][1] in (
        "d.clamp_min(0)",
        "torch.cat([c[:, :1], c[:, :-1].cumsum(1)], 1)",
    )


def copied(x):
    x = F.dropout(x.mT.contiguous().mT.reshape(-1, 8).view_as(x), 0.5, False)
    return (x + 0.0).clone() * torch.ones(8)


def test_copies_views_and_constants_make_no_pairs():
    found = diff_by_value(Toy(copied), Toy(), TOKENS)
    assert found.same
    assert [pair.left.op for pair in found.pairs] == ["embedding", "linear"]
    assert not found.alone["left"]


def test_a_function_that_hides_several_is_opened():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    bias = torch.randn(24).double()
    attention.in_proj_bias.data = bias

    def hidden(x):
        return attention(x, x, x, need_weights=False)[0]

    def shown(x):
        qkv = F.linear(x, attention.in_proj_weight, bias)
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in qkv.chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return attention.out_proj(y.transpose(1, 2).flatten(2))

    left, right = Toy(hidden).double(), Toy(shown).double()
    found = diff_by_value(left, right, TOKENS)
    assert found.same, found.sentence
    parts = [p for p in found.pairs if p.right.code == "qkv.chunk(3, -1)"]
    assert len(parts) == 3
    assert all(p.left.code.startswith("attention(x, x, x") for p in parts)


def test_a_compiled_model_is_recorded_like_any_other(weights):
    left = torch.compile(build("mingpt_style", weights), backend="eager")
    found = diff_by_value(left, build("scratch", weights), TOKENS)
    assert found.same, found.sentence
    assert len(found.pairs) >= 30


def test_a_model_may_take_gradients_itself():
    def derivative(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.pow(3).sum(), x)[0]

    found = diff_by_value(Toy(derivative), Toy(lambda x: 3 * x**2), TOKENS)
    assert found.same, found.sentence


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.requires_grad_(False),
        lambda weight: weight.register_hook(lambda gradient: 2 * gradient),
    ],
    ids=["frozen", "hook"],
)
def test_a_change_of_gradients_only_is_found(change):
    """The diff finds a change on one side; the same change on both is fine."""
    left, right = Toy(), Toy()
    for sides in ((left, right), (right, left)):
        change(right.head.weight)
        found = diff_by_value(*sides, TOKENS, gradients=True)
        assert "another gradient: that of head.weight" in found.sentence
    change(left.head.weight)
    change(left.head.weight)
    found = diff_by_value(left, right, TOKENS, gradients=True)
    assert found.same, found.sentence
    assert ", 3 gradients equal" in found.sentence


def test_a_scripted_part_is_noted():
    part = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    left, right = Toy(), Toy()
    left.middle = right.middle = part
    found = diff_by_value(left, right, TOKENS)
    assert found.same
    assert any("is scripted" in note for note in found.notes)
    assert "is scripted" in str(found)


def test_single_precision_inside_is_not_a_fault():
    def single(x):
        return x.float().softmax(-1).to(x.dtype)

    def double(x):
        return x.softmax(-1)

    left, right = Toy(single).double(), Toy(double).double()
    found = diff_by_value(left, right, TOKENS)
    assert found.same, found.sentence
    assert found.pairs[-1].difference > 1e-12


def test_a_coarser_dtype_is_reported_with_its_line():
    """A float32 constant counts as rounding; a bfloat16 cast does not."""

    def constant(x):
        return x * torch.sqrt(torch.tensor(2 / torch.pi))

    def plain(x):
        return x * (2 / torch.pi) ** 0.5

    def brain(x):
        return (x.bfloat16() * 1.0).to(x.dtype) * (2 / torch.pi) ** 0.5

    left = Toy(plain).double()
    for sides in ((left, Toy(constant)), (Toy(constant), left)):
        found = diff_by_value(*[side.double() for side in sides], TOKENS)
        assert found.same, found.sentence
        assert re.search(
            r"^one function up to float32: \S+:\d+ `\w+` is a float32 "
            r"constant: \d+ intermediate values .*; log-prob\S+ \de-08 apart",
            found.sentence,
        ), found.sentence
    found = diff_by_value(left, Toy(brain).double(), TOKENS)
    assert not found.same
    assert "x.bfloat16()" in found.parted.right.code, found.sentence
    assert re.search(r"scores 0\.0\d+ apart; values", found.sentence)


def test_an_equal_part_excuses_only_that_part():
    """A decay is 1 at the first position, so a fault shows only later on."""

    def decayed(x, rate=0.5):
        scaled = x * torch.exp(-rate * torch.arange(x.size(1)))[:, None]
        first, rest = scaled[:, :1], scaled[:, 1:]
        return torch.cat([first.tanh(), rest.sigmoid()], 1)

    bad = Toy(partial(decayed, rate=0.4))
    found = diff_by_value(Toy(decayed), bad, TOKENS)
    line = found.parted.right.code
    assert "torch.exp(-rate" in line, found.sentence


def test_a_missing_step_is_shown_next_to_the_line():
    """The next norm cancels the missing scale, except for its eps."""

    def scaled(x):
        scaled = x * 8**0.5
        return F.rms_norm(scaled, (8,), eps=1e-2)

    def unscaled(x):
        return F.rms_norm(x, (8,), eps=1e-2)

    found = diff_by_value(Toy(scaled), Toy(unscaled), TOKENS)
    assert found.parted.before.code == "x * 8**0.5", found.sentence
    assert f"the left first computes {found.parted.before}" in found.sentence
    assert "self.table(idx)" in [p.code for p in found.parted.shown]


def test_a_norm_has_its_call_site(weights):
    left = transformers_gpt2(weights, "eager")
    right = build("ported", weights)
    right.tensors[right.names.index("h.0.ln_2.bias")].data += 0.1
    found = diff_by_value(left, right, TOKENS)
    assert re.search(r"called from line \d+, layer 0", found.sentence)
    called = linecache.getline(*found.parted.right.caller[:2])
    assert called.strip().startswith("second = norm("), found.sentence


def test_the_vocabulary_comes_from_the_other_side():
    table = torch.randn(29, 29)
    left = lambda idx: table[idx] * 2  # noqa: E731
    right = lambda idx: 2 * table[idx]  # noqa: E731
    right.vocab_size = 29
    for sides in ((left, right), (right, left)):
        assert diff_by_value(*sides, TOKENS).same
    (note,) = diff_by_value(Toy().double(), right, TOKENS).notes
    assert note.endswith("does not run in float64: both ran in float32")


def test_scarce_memory_compares_large_models_in_their_own_dtype(monkeypatch):
    monkeypatch.setattr("gpt_duet.running.subject.HEAVY", 0)
    monkeypatch.setattr("gpt_duet.running.variant.free_bytes", lambda _: 1e3)
    found = diff_by_value(Toy(), Toy(), TOKENS)
    assert found.same
    assert {side.dtype for side in found.sides} == {torch.float32}
    assert any(
        "GB of memory" in note and note.endswith("both ran in float32")
        for note in found.notes
    )


def test_a_function_without_weights_to_double():
    table = torch.randn(29, 29)

    def left(idx):
        return table[idx] * 2

    def right(idx):
        return 2 * table.index_select(0, idx.flatten()).view(*idx.shape, 29)

    found = diff_by_value(left, right, TOKENS, vocab_size=29)
    assert found.same
    assert any("does not run in float64" in note for note in found.notes)


# --- The report -------------------------------------------------------------


def test_json_has_everything(weights):
    left, right = build("annotated", weights), build("mingpt_style", weights)
    one = json.loads(json.dumps(diff_by_value(left, right, TOKENS).to_json()))
    assert one["same"] is True
    assert one["parted"] is None
    pair = one["pairs"][0]
    assert pair["left"]["file"] == "annotated/embedding.py"
    assert pair["right"]["op"] == "embedding"
    assert pair["difference"] < 1e-12
    assert set(one["alone"]) == {"left", "right"}
    right.transformer.h[1].mlp.act = nn.GELU()
    two = json.loads(json.dumps(diff_by_value(left, right, TOKENS).to_json()))
    assert two["same"] is False
    assert two["parted"]["right"]["file"] == "mingpt_style/feed_forward.py"
    assert two["parted"]["layer"] == 1
    assert 1e-5 < two["parted"]["difference"] < 1e-2


def test_printing_folds_repeated_lines(weights):
    left, right = build("annotated", weights), build("mingpt_style", weights)
    text = str(diff_by_value(left, right, TOKENS))
    assert text.count("self.c_fc(x) ") == 1
    assert "layer 0; layer 1 runs the same lines; " in text
    assert text.splitlines()[-1].startswith("one function: ")
    table = text[: text.index("weights: ")]
    assert max(map(len, table.splitlines())) <= 120
    right.transformer.h[1].mlp.act = nn.GELU()
    text = str(diff_by_value(left, right, TOKENS))
    assert "after the first difference: " in text
    assert "as layer" not in text  # the second layer differs halfway


@pytest.mark.parametrize(
    ("model", "tokens", "words"),
    [
        (Toy, [-1], "token -1 is not in the"),
        (Toy, [[[1]]], r"must be ids.* \(1, 1, 1\)"),
        (Toy, [0.5], "must be ids"),
        (lambda: Toy(lambda x: 1 / 0), [1, 2], "ZeroDivisionError"),
        (lambda: Toy(lambda x: x @ x), [1, 2], r"by_value\.py, line"),
        (lambda: Toy(lambda x: x[:, -1:]), [1, 2], "should have shape"),
        (lambda: {}["no model"], [1, 2], "raised KeyError"),
        (lambda: None, [1, 2], "no model but NoneType"),
        (lambda: Toy(lambda x: x / 0 * 0), [1], "29 of 29 scores are NaN"),
    ],
)
def test_bad_input_is_one_clear_line(model, tokens, words):
    with pytest.raises(ValueError, match=words) as raised:
        diff_by_value(model, Toy, tokens)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_gpt2_small_fits_in_four_gibibytes(tmp_path):
    """Both sides have 124 million parameters and run on 128 tokens."""
    program = f"""
import resource, torch
from transformers import GPT2Config, GPT2LMHeadModel
from gpt_duet.checkpoint import load_checkpoint
from gpt_duet import diff_by_value
from gpt_duet import mingpt_style

def ours():
    checkpoint = load_checkpoint({str(tmp_path)!r})
    state = checkpoint.to(torch.device("cpu"), torch.float32)
    return mingpt_style.from_gpt2(state, checkpoint.config)

def theirs():
    return GPT2LMHeadModel.from_pretrained({str(tmp_path)!r})

GPT2LMHeadModel(GPT2Config()).save_pretrained({str(tmp_path)!r})
tokens = torch.randint(50257, (1, 128))
found = diff_by_value(theirs, ours, tokens)
print(found.sentence, len(found.pairs))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    # ru_maxrss starts at the parent process's value, so the parent is a shell
    shell = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, program]
    done = subprocess.run(shell, capture_output=True, text=True)
    *_, sentence, peak = done.stdout.splitlines()
    assert sentence.startswith("one function: "), done
    assert int(peak) * 1024 < 4 * 2**30
