"""Properties of the kit's models: both styles, and the rungs of the ladder."""

import math

import pytest
import torch
import torch.nn.functional as F
from both_styles import STYLES
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpt_duet import generate, mingpt_style
from gpt_duet.config import GPTConfig
from gpt_duet.mingpt_style import GPT
from gpt_duet.mingpt_style.ladder import RUNGS
from gpt_duet.protocol import LanguageModel
from gpt_duet.testing.strategies import (
    configs,
    random_model,
    random_tokens,
    seeds,
    token_batches,
)

SMALL = GPTConfig(17, 12, n_layer=2, n_head=2, n_embd=16)
BUILDERS = {name: style.build_model for name, style in STYLES.items()} | RUNGS
# The predictions of these models depend only on the last token.
DEAF = ("bigram table", "+ positions")


@pytest.fixture(params=BUILDERS)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    return BUILDERS[name](SMALL).double().eval()


# The contract --------------------------------------------------------------


def test_a_style_keeps_the_contract_of_a_language_model(model):
    assert isinstance(model, LanguageModel)
    assert model.config == SMALL
    assert (model.vocab_size, model.block_size) == (17, 12)
    for batch, time in ((1, 1), (3, 12), (2, 5)):
        tokens = random_tokens(SMALL, batch, time)
        out = model.log_probs(tokens)
        assert out.shape == (batch, time, 17)
        total = torch.ones(batch, time).double()
        torch.testing.assert_close(out.exp().sum(-1), total)
    assert generate(model, tokens, 20).shape == (2, 25)
    with pytest.raises(ValueError, match=r"13 tokens .* 12 positions"):
        model.log_probs(random_tokens(SMALL, 1, 13))


def test_no_gradient_flows_from_a_position_to_the_future(name, model):
    tokens = torch.arange(12).unsqueeze(0)
    table = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    for position in range(12):
        model.zero_grad()
        model.log_probs(tokens)[0, position].square().sum().backward()
        reached = table.weight.grad[:12].abs().sum(-1) > 0
        first = position if name in DEAF else 0
        assert reached.tolist() == [first <= s <= position for s in range(12)]


@pytest.mark.parametrize("build", [mingpt_style.GPT, *RUNGS.values()])
def test_the_loss_is_the_mean_cross_entropy_of_the_targets(build):
    model = build(SMALL).double().eval()
    idx = random_tokens(SMALL, 3, 9)
    targets = random_tokens(SMALL, 9, 3, seed=1).t()  # not contiguous
    targets[0, 0] = 0
    # some positions of these rows have no target
    targets[1:][torch.rand(2, 9) < 0.3] = -1
    logits, loss = model(idx, targets)
    there = targets >= 0
    assert 0 < (~there).sum() < 18
    log_probs = F.log_softmax(logits, dim=-1)
    picked = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -picked[there].mean())
    # the logits do not depend on the targets
    again, none = model(idx)
    assert none is None
    assert again.equal(logits)
    assert model.log_probs(idx).equal(log_probs)


# Both styles, with any config ----------------------------------------------


@given(data=st.data())
def test_every_position_gets_a_distribution(style, data):
    config = data.draw(configs())
    tokens = data.draw(token_batches(config))
    model = style.build_model(config).eval()
    log_probs = model.log_probs(tokens)
    assert log_probs.shape == (*tokens.shape, config.vocab_size)
    torch.testing.assert_close(
        log_probs.exp().sum(-1), torch.ones(tokens.shape)
    )
    torch.testing.assert_close(model.next_log_probs(tokens), log_probs[:, -1])


@given(data=st.data())
def test_another_suffix_leaves_the_prefix_bit_equal(style, data):
    config = data.draw(configs(vocab_size=13))
    tokens = data.draw(token_batches(config))
    split = data.draw(st.integers(0, tokens.size(1)))
    other = tokens.clone()
    other[:, split:] = random_tokens(config, *other[:, split:].shape, seed=9)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    model = random_model(style, config, data.draw(seeds), dtype)
    before = model.log_probs(tokens)[:, :split]
    assert before.equal(model.log_probs(other)[:, :split])


def test_the_sizes_of_the_config_are_honoured(style):
    config = SMALL.replace(n_inner=7, norm_eps=0.25, n_layer=3)
    model = style.build_model(config)
    norms = [m for m in model.modules() if hasattr(m, "eps")]
    assert len(norms) == 7
    assert {m.eps for m in norms} == {0.25}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert sum(m.out_features == 7 for m in linears) == 3


# Inputs and modes ----------------------------------------------------------


def test_every_dropout_is_applied_and_its_output_used(style, monkeypatch):
    model = style.build_model(SMALL.replace(dropout=0.25)).train()
    tokens = random_tokens(SMALL, 2, 8)
    calls, rates = [], []
    kernel = F.scaled_dot_product_attention

    def watched(*arguments, **options):
        rates.append(options["dropout_p"])
        return kernel(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for m in dropouts:
        m.register_forward_hook(lambda m, _inputs, _output: calls.append(m))
    model.log_probs(tokens)
    assert len(calls) == len(set(calls)) == len(dropouts)
    # The embedding has one dropout, and each layer two, for its residuals.
    # annotated has two more a layer, the other style one in its kernel.
    fused = style is mingpt_style
    assert len(dropouts) == 1 + 2 * (2 if fused else 4)
    assert rates == ([0.25, 0.25] if fused else [])

    # the model uses the output of each dropout module
    expected = model.eval().log_probs(tokens)
    assert model.log_probs(tokens).equal(expected)
    for m in dropouts:
        hook = m.register_forward_hook(lambda _m, _inputs, x: x * 0)
        assert (model.log_probs(tokens) - expected).abs().max() > 1e-4
        hook.remove()


# The compiler --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_the_compiler(style, backend):
    model = random_model(style, SMALL, dtype=torch.float32)
    tokens = random_tokens(SMALL, 2, 8)
    compiled = torch.compile(model.log_probs, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(tokens), model.log_probs(tokens))


@pytest.mark.unhooked
def test_an_export_takes_any_number_of_rows_and_tokens(style):
    model = random_model(style, SMALL, dtype=torch.float32)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time", max=12)}
    tokens = random_tokens(SMALL, 2, 5)
    program = torch.export.export(model, (tokens,), dynamic_shapes=(sizes,))
    tokens = random_tokens(SMALL, 3, 11)
    found, expected = program.module()(tokens), model(tokens)
    torch.testing.assert_close(found, expected)


# mingpt_style follows GPT-2 and minGPT in initialisation, loss and names


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
