"""What holds for the models of both styles: shapes, causality, contract."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    STYLES,
    configs,
    random_state,
    random_tokens,
    seeds,
    token_batches,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared.config import GPTConfig
from shared.protocol import LanguageModel

pytestmark = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)

SMALL = GPTConfig(17, 12, n_layer=2, n_head=2, n_embd=16)


def random_model(style, config, seed=0, dtype=torch.float64):
    model = style.from_gpt2(random_state(config, seed, dtype), config)
    return model.eval()


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


def test_the_contract(style):
    model = style.build_model(SMALL)
    assert isinstance(model, LanguageModel)
    assert model.config == SMALL
    assert (model.vocab_size, model.block_size) == (17, 12)


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


@given(data=st.data())
def test_a_shorter_input_agrees_to_rounding(style, data):
    config = data.draw(configs(vocab_size=13, norm_eps=1e-5))
    tokens = data.draw(token_batches(config))
    split = data.draw(st.integers(1, tokens.size(1)))
    model = random_model(style, config, data.draw(seeds))
    torch.testing.assert_close(
        model.log_probs(tokens[:, :split]),
        model.log_probs(tokens)[:, :split],
        rtol=1e-9,
        atol=1e-9,
    )


def test_no_gradient_flows_from_a_position_to_the_future(style):
    model = random_model(style, SMALL)
    tokens = torch.arange(12).unsqueeze(0)  # each id once
    table = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    for position in range(12):
        model.zero_grad()
        model.log_probs(tokens)[0, position].square().sum().backward()
        reached = table.weight.grad[:12].abs().sum(-1) > 0
        assert reached.tolist() == [s <= position for s in range(12)]


def test_rows_of_a_batch_do_not_meet(style):
    model = random_model(style, SMALL)
    tokens = random_tokens(SMALL, 4, 9)
    together = model.log_probs(tokens)
    for row in range(4):
        alone = model.log_probs(tokens[row : row + 1])[0]
        torch.testing.assert_close(together[row], alone)


def test_the_order_of_the_past_matters(style):
    model = random_model(style, SMALL)
    tokens = torch.arange(6).unsqueeze(0)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    change = model.log_probs(tokens)[:, -1] - model.log_probs(swapped)[:, -1]
    assert change.abs().max() > 1e-3


@given(data=st.data())
def test_a_sequence_too_long_is_refused_with_both_numbers(style, data):
    config = data.draw(configs())
    model = style.build_model(config)
    time = config.block_size + data.draw(st.integers(1, 3))
    with pytest.raises(
        ValueError, match=rf"{time} tokens .* {config.block_size} positions"
    ):
        model.log_probs(random_tokens(config, 1, time))


def test_one_position_does_not_broadcast(style):
    model = style.build_model(SMALL.replace(block_size=1))
    with pytest.raises(ValueError, match="2 tokens"):
        model.log_probs(torch.tensor([[1, 2]]))


def test_an_id_outside_the_vocabulary_is_refused(style):
    model = style.build_model(SMALL)
    for wrong in (-1, 17):
        with pytest.raises(IndexError):
            model.log_probs(torch.tensor([[wrong]]))


def test_dropout_is_on_in_train_mode_and_off_in_eval_mode(style):
    tokens = random_tokens(SMALL, 2, 8)
    model = style.build_model(SMALL)
    assert not model.log_probs(tokens).equal(model.log_probs(tokens))
    model.eval()
    assert model.log_probs(tokens).equal(model.log_probs(tokens))


def test_dropout_zero_reaches_every_part(style):
    model = style.build_model(SMALL.replace(dropout=0.0)).train()
    tokens = random_tokens(SMALL, 2, 8)
    assert model.log_probs(tokens).equal(model.log_probs(tokens))


def test_every_dropout_is_applied_and_its_output_used(style, monkeypatch):
    model = style.build_model(SMALL.replace(dropout=0.25)).train()
    tokens = random_tokens(SMALL, 2, 8)
    calls, told = [], []
    kernel = F.scaled_dot_product_attention

    def watched(*arguments, **options):
        told.append(options["dropout_p"])
        return kernel(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for m in dropouts:
        m.register_forward_hook(lambda m, _inputs, _output: calls.append(m))
    model.log_probs(tokens)
    assert len(calls) == len(set(calls)) == len(dropouts)
    # embedding; in every layer both residuals, and the annotated style's
    # attention and feed-forward, where the other has the kernel's own
    fused = style is STYLES["mingpt_style"]
    assert len(dropouts) == 1 + 2 * (2 if fused else 4)
    assert told == ([0.25, 0.25] if fused else [])

    # what goes on is what the dropout returned, and nothing else
    expected = model.eval().log_probs(tokens)
    for m in dropouts:
        hook = m.register_forward_hook(lambda _m, _inputs, x: x * 0)
        assert (model.log_probs(tokens) - expected).abs().max() > 1e-4
        hook.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_stays_close(style, dtype):
    model = random_model(style, SMALL, dtype=torch.float32)
    tokens = random_tokens(SMALL, 2, 12)
    exact = model.log_probs(tokens)
    half = copy.deepcopy(model).to(dtype).log_probs(tokens)
    assert half.dtype == dtype
    assert (half.float() - exact).abs().max() < 0.5
    assert half.isfinite().all()


class MakesNothingOnTheCpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.is_meta, func
        return result


def test_everything_is_made_on_the_device_of_the_tokens(style):
    model = style.build_model(SMALL).to("meta")
    tokens = torch.zeros(2, 5, dtype=torch.long, device="meta")
    with MakesNothingOnTheCpu():
        assert model.log_probs(tokens).is_meta


def test_copies_compute_the_same(style):
    model = style.build_model(SMALL).eval()
    tokens = random_tokens(SMALL, 2, 8)
    expected = model.log_probs(tokens)
    reloaded = style.build_model(SMALL).eval()
    assert not reloaded.log_probs(tokens).equal(expected)
    reloaded.load_state_dict(model.state_dict())
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        reloaded,
    ):
        assert other.log_probs(tokens).equal(expected)


def test_a_forward_with_gradients_can_be_copied(style):
    model = style.build_model(SMALL)
    model.log_probs(random_tokens(SMALL, 2, 8)).sum()
    assert isinstance(copy.deepcopy(model), type(model))


@pytest.mark.unhooked
def test_one_graph_for_the_compiler(style):
    model = random_model(style, SMALL, dtype=torch.float32)
    tokens = random_tokens(SMALL, 2, 8)
    compiled = torch.compile(
        model.log_probs, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(tokens), model.log_probs(tokens))


@pytest.mark.slow
@pytest.mark.unhooked
def test_compiled_it_computes_the_same(style):
    model = random_model(style, SMALL, dtype=torch.float32)
    tokens = random_tokens(SMALL, 2, 8)
    compiled = torch.compile(model.log_probs, fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model.log_probs(tokens))


@settings(max_examples=20)
@given(data=st.data())
def test_a_fresh_model_knows_nothing_yet(style, data):
    config = data.draw(configs(min_embd=16, vocab_size=64, block_size=16))
    model = style.build_model(config.replace(norm_eps=None)).eval()
    tokens = random_tokens(config, 4, 16)
    loss = -model.log_probs(tokens).mean(dim=(0, 1, 2))
    assert abs(loss.item() - torch.tensor(64.0).log().item()) < 1.5


def test_activations_of_the_config_are_honoured(style):
    outputs = {}
    tokens = random_tokens(SMALL, 1, 5)
    for name in ("relu", "gelu", "gelu_tanh"):
        config = SMALL.replace(activation=name)
        outputs[name] = random_model(style, config).log_probs(tokens)
        assert style.build_model(config).config.activation == name
    gelus = (outputs["gelu"] - outputs["gelu_tanh"]).abs().max()
    assert 1e-6 < gelus < 1e-1
    assert (outputs["relu"] - outputs["gelu"]).abs().max() > 1e-2


def test_the_parameters_of_the_config_are_honoured(style):
    config = SMALL.replace(n_inner=7, norm_eps=0.25, n_layer=3)
    model = style.build_model(config)
    norms = [m for m in model.modules() if hasattr(m, "eps")]
    assert len(norms) == 7
    assert {m.eps for m in norms} == {0.25}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert sum(m.out_features == 7 for m in linears) == 3
