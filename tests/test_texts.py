"""What the three texts show, feature by feature and figure by figure.

The numbers are those of the list of features and exact figures that was
drawn up from the texts before the kit was written: a "feature" is what a
text shows or describes, a "figure" a number printed in it that can be had
again to the last digit. Where a text's listing is wrong, what is tested is
the right behaviour.
"""

import copy
import inspect
import math
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import annotated
import mingpt_style
import shared.cli
from shared import GPTConfig, generate, load_tokenizer
from shared.generation import Sampler, generate_rows
from shared.masks import causal_mask, slice_mask, subsequent_mask
from shared.protocol import load_style
from shared.tokenization.texts import random_batch, read_text, split_ids

FEATURES = {*range(1, 5), *range(7, 10), 18, 19, *range(21, 50)}
FIGURES = {*range(1, 5), *range(11, 19)}

# Features that the kit leaves out, and why. Five at most.
REASONS = {
    31: "a rate for each part: one dropout serves all, as in the paper",
}

STYLES = ("annotated", "mingpt_style")
CONFIG = GPTConfig(
    vocab_size=10, block_size=12, n_layer=2, n_head=2, n_embd=16, dropout=0.1
)


def test_every_number_has_a_test_or_a_reason():
    names = [n for n in globals() if n.startswith("test_")]
    features = {int(m[1]) for n in names if (m := _number("feature", n))}
    figures = {int(m[1]) for n in names if (m := _number("figure", n))}
    assert features | REASONS.keys() == FEATURES
    assert not features & REASONS.keys()
    assert figures == FIGURES
    assert len(REASONS) <= 5


def _number(kind, name):
    return re.match(rf"test_{kind}_(\d+)_", name)


@pytest.fixture(params=STYLES)
def style(request):
    return load_style(request.param)


@pytest.fixture
def model(style):
    return style.build_model(CONFIG).eval()


@pytest.fixture(scope="module")
def shakespeare(sibling):
    file = sibling / "data" / "tinyshakespeare.txt"
    if not file.is_file():
        pytest.skip("Tiny Shakespeare is not beside the kit")
    return read_text(file)


@pytest.fixture(scope="module")
def char(shakespeare):
    return load_tokenizer("char", shakespeare)


def log_probs(model, tokens):
    with torch.no_grad():
        return model.log_probs(tokens)


# Data, tokens, batches -----------------------------------------------------


def test_feature_01_read_a_file_and_sort_its_characters(tmp_path):
    (tmp_path / "input.txt").write_bytes(b"b c\na b\r\n")
    text = read_text(tmp_path / "input.txt")
    tokenizer = load_tokenizer("char", text)
    assert len(text) == 9  # no line end is lost
    assert tokenizer.characters == "\n\r abc"
    assert tokenizer.n_vocab == 6


def test_feature_02_characters_round_trip(shakespeare, char):
    assert char.decode(char.encode(shakespeare)) == shakespeare
    with pytest.raises(ValueError, match="not among the 65 known ones: '2'"):
        char.encode("hello world 2")


def test_feature_03_the_text_as_one_long_tensor(shakespeare, char):
    data = torch.tensor(char.encode(shakespeare))
    assert data.dtype == torch.long
    assert data.dim() == 1
    assert char.decode(data[-9:].tolist()) == shakespeare[-9:]


def test_feature_04_every_prefix_of_a_window_is_an_example():
    data = torch.tensor([18, 47, 56, 57, 58, 1, 15, 47, 58])
    x, y = random_batch(data, 1, 8)  # the text has this one window
    examples = [(x[0, : t + 1].tolist(), int(y[0, t])) for t in range(8)]
    assert examples[0] == ([18], 47)
    assert examples[-1] == ([18, 47, 56, 57, 58, 1, 15, 47], 58)
    assert [len(context) for context, _ in examples] == list(range(1, 9))
    assert all(data[len(c)] == target for c, target in examples)


def test_feature_07_byte_pairs_by_a_models_name(r50k_base):
    davinci = load_tokenizer("davinci")
    assert davinci.n_vocab == 50257
    assert davinci.encode("galaxy") == r50k_base.encode("galaxy")
    # without a network and a cache the kit's own will do
    assert load_tokenizer("duet-1k").n_vocab == 1024


def test_feature_08_a_prompt_repeated(model):
    tokens = torch.tensor([1, 2, 3, 4]).unsqueeze(0).repeat(3, 1)
    assert tokens.shape == (3, 4)
    rows = generate(model, tokens, 5)
    # in eval mode equal prompts go on equally: the post's did not
    assert rows.unique(dim=0).shape == (1, 9)


def test_feature_09_every_row_is_decoded_and_printed(monkeypatch, capsys):
    arguments = ["--batch=3", "--n-layer=1", "--n-embd=16", "--ids"]
    monkeypatch.setattr(sys, "argv", ["gpt-duet", "generate", *arguments])
    with pytest.raises(SystemExit) as exit_:
        shared.cli.main()
    assert not exit_.value.code
    lines = capsys.readouterr().out.splitlines()
    ids = [list(map(int, line.split())) for line in lines[1::2]]
    assert len(ids) == 3
    texts = [load_tokenizer("duet-1k").decode(row) for row in ids]
    assert lines[::2] == texts
    assert texts[0].startswith("A long time ago")


# Models --------------------------------------------------------------------


def test_feature_18_all_heads_in_one_projection():
    fused = mingpt_style.CausalSelfAttention(CONFIG)
    assert fused.c_attn.weight.shape == (48, 16)
    x = torch.randn(2, 5, 16)
    fused.train()
    assert fused(x).isfinite().all()  # the post's is NaN in train mode
    fused.eval()
    # head by head, as the formula has it
    parts = fused.c_attn(x).unflatten(-1, (3, 2, 8)).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    out, _ = annotated.attention(q, k, v, subsequent_mask(5))
    want = fused.c_proj(out.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(fused(x), want)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
def test_feature_19_feed_forward_four_times_as_wide(style, activation):
    config = CONFIG.replace(activation=activation)
    model = style.build_model(config).eval()
    ff = model.get_submodule(
        style.STAGES["block.{i}.feed_forward"].format(i=0)
    )
    wide, narrow = (m for m in ff.modules() if isinstance(m, nn.Linear))
    assert wide.weight.shape == (64, 16)
    assert narrow.weight.shape == (16, 64)
    assert [m.p for m in ff.modules() if isinstance(m, nn.Dropout)] == [0.1]
    formulas = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    x = torch.randn(2, 3, 16)
    want = narrow(formulas[activation](wide(x)))
    torch.testing.assert_close(ff(x), want)


def test_feature_21_own_layer_norm_over_the_last_axis():
    x = 3 + 5 * torch.randn(4, 7, 32)
    out = annotated.LayerNorm(32)(x)
    assert out.mean(-1).abs().max() < 1e-6
    assert (out.std(-1) - 1).abs().max() < 1e-5
    # a row's norm does not hear of the other positions
    x[:, 3] = 100 * torch.randn(4, 32)
    again = annotated.LayerNorm(32)(x)
    assert again[:, :3].equal(out[:, :3])


def test_feature_22_a_last_norm_and_a_head(style, model):
    norm = model.get_submodule(style.STAGES["final_norm"])
    seen = []
    norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    got = log_probs(model, torch.tensor([[1, 2, 3]]))
    weights = style.to_gpt2(model)
    logits = seen[0] @ weights["lm_head.weight"].t()
    logits = logits + weights.get("lm_head.bias", 0)
    torch.testing.assert_close(got, logits.log_softmax(-1))


def test_feature_23_a_whole_decoder_with_its_loss(model):
    tokens = torch.randint(10, (4, 12))
    targets = torch.randint(10, (4, 12))
    got = log_probs(model, tokens)
    assert got.shape == (4, 12, 10)
    loss = F.nll_loss(got.flatten(0, 1), targets.flatten())
    assert abs(loss - math.log(10)) < 0.75  # fresh: it knows next to nothing
    if isinstance(model, mingpt_style.GPT):
        logits, own = model(tokens, targets)
        torch.testing.assert_close(logits.log_softmax(-1), got)
        torch.testing.assert_close(own, loss)


def test_feature_24_positions_learned_and_sinusoidal():
    pe = annotated.PositionalEncoding(16, dropout=0.0).pe
    assert pe.shape == (1, 5000, 16)
    assert pe[0, 0].tolist() == [0, 1] * 8
    position, pair = 1234, 3
    angle = position / 10000 ** (2 * pair / 16)
    assert pe[0, position, 2 * pair] == pytest.approx(math.sin(angle))
    assert pe[0, position, 2 * pair + 1] == pytest.approx(math.cos(angle))
    encoding = annotated.PositionalEncoding(16, dropout=0.0)
    assert not list(encoding.parameters())
    learned = mingpt_style.GPT(CONFIG).transformer.wpe
    assert learned.weight.shape == (12, 16)
    assert learned.weight.requires_grad


def test_feature_25_embeddings_scaled_by_the_root_of_the_width():
    embeddings = annotated.Embeddings(16, 10)
    x = torch.tensor([[1, 2]])
    assert embeddings(x).equal(4 * embeddings.lut(x))


def test_feature_26_the_generator_gives_log_probabilities():
    generator = annotated.Generator(16, 10)
    out = generator(torch.randn(3, 16))
    assert (out <= 0).all()
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(3))


def test_feature_27_the_mask_makes_the_decoder():
    q, k, v = torch.randn(3, 1, 4, 8).unbind(0)
    _, seen = annotated.attention(q, k, v, mask=None)
    assert (seen > 0).all()  # an encoder's: all see all
    _, seen = annotated.attention(q, k, v, mask=subsequent_mask(4))
    assert seen.triu(1).count_nonzero() == 0
    assert (seen.tril() > 0).sum() == 10


def test_feature_28_queries_from_here_keys_and_values_from_there():
    cross = annotated.MultiHeadedAttention(h=2, d_model=16, dropout=0.0)
    x, memory = torch.randn(3, 4, 16), torch.randn(3, 7, 16)
    out = cross(x, memory, memory)
    assert out.shape == (3, 4, 16)
    # values count where they stand, whatever order they are given in
    turned = torch.randperm(7)
    again = cross(x, memory[:, turned], memory[:, turned])
    torch.testing.assert_close(out, again)
    other = cross(x, memory, torch.randn(3, 7, 16))
    assert not torch.allclose(out, other)


def test_feature_29_a_configuration_object():
    config = GPTConfig(10, 12)
    assert (config.n_layer, config.n_head, config.n_embd) == (12, 12, 768)
    assert config.dropout == 0.1
    gpt2 = GPTConfig.preset("gpt2-xl", block_size=2048)
    assert (gpt2.n_layer, gpt2.n_embd, gpt2.block_size) == (48, 1600, 2048)
    with pytest.raises(ValueError, match="unknown fields: n_heads"):
        GPTConfig.preset("gpt2", n_heads=8)  # the post's takes any name


def test_feature_30_a_factory_with_fresh_layers():
    model = annotated.make_model(10, N=3, d_model=16, d_ff=32, h=2)
    layers = [layer.state_dict() for layer in model.decoder.layers]
    assert len(layers) == 3
    name = "self_attn.linears.0.weight"
    assert not layers[0][name].equal(layers[1][name])
    # Xavier's uniform distribution ends at sqrt(6 / (in + out))
    assert 0.8 < layers[0][name].abs().max() / math.sqrt(6 / 32) <= 1
    lone = nn.Linear(2, 2)
    one, two = annotated.clones(lone, 2)
    assert one.weight.equal(two.weight)
    assert one.weight is not two.weight
    assert copy.deepcopy(model) is not model  # no lambda, no kept graph


# Masks and attention -------------------------------------------------------


def test_feature_32_a_mask_for_five():
    mask = causal_mask(5)
    assert mask.shape == (1, 1, 5, 5)
    assert mask.int().tolist() == [
        [[[1] * (t + 1) + [0] * (4 - t) for t in range(5)]]
    ]


def test_feature_33_a_slice_for_three():
    assert slice_mask(causal_mask(5), 3).equal(causal_mask(3))
    with pytest.raises(ValueError, match="5 positions has no slice for 6"):
        slice_mask(causal_mask(5), 6)


def test_feature_34_masked_scores_and_their_softmax():
    scores = torch.randn(3, 2, 3, 3)
    masked = scores.masked_fill(~causal_mask(3), float("-inf"))
    weights = masked.softmax(-1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 3))
    assert weights[..., 0, 0].eq(1).all()
    # the same through attention: q k^T / sqrt(d_k) is the scores
    q, k = scores * math.sqrt(3), torch.eye(3).expand(3, 2, 3, 3)
    _, p_attn = annotated.attention(q, k, k, causal_mask(3))
    torch.testing.assert_close(p_attn, weights)


def test_feature_35_subsequent_mask():
    mask = subsequent_mask(7)
    assert mask.dtype == torch.bool
    assert mask.shape == (1, 7, 7)
    assert mask.equal(torch.ones(1, 7, 7).tril().bool())


def test_feature_36_attention_gives_its_weights():
    x = torch.randn(2, 4, 16)
    out, p_attn = annotated.attention(x, x, x)
    torch.testing.assert_close(out, p_attn @ x)
    module = annotated.MultiHeadedAttention(2, 16).train()
    module(x, x, x, subsequent_mask(4))
    assert module.attn is None  # kept where asked for, and not else
    module.keep_attn = True
    module(x, x, x, subsequent_mask(4))
    assert module.attn.shape == (2, 2, 4, 4)
    assert not module.attn.requires_grad
    # before dropout: the rows sum to one in train mode, too
    torch.testing.assert_close(module.attn.sum(-1), torch.ones(2, 2, 4))


def test_feature_37_one_mask_for_all_rows_and_heads():
    module = annotated.MultiHeadedAttention(2, 16).eval()
    x = torch.randn(3, 4, 16)
    one = module(x, x, x, subsequent_mask(4))
    each = module(x, x, x, subsequent_mask(4).expand(3, 4, 4))
    assert one.equal(each)


def test_feature_38_any_length_up_to_the_block(model):
    tokens = torch.randint(10, (2, 12))
    full = log_probs(model, tokens)
    for T in range(1, 13):
        part = log_probs(model, tokens[:, :T])
        torch.testing.assert_close(part, full[:, :T])


def test_feature_39_too_long_is_refused(model):
    with pytest.raises(ValueError, match=r"13 tokens .* 12 positions"):
        model.log_probs(torch.zeros(1, 13, dtype=torch.long))


def test_feature_40_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match="n_embd=16 and n_head=3"):
        CONFIG.replace(n_head=3)
    with pytest.raises(ValueError, match=r"h=3 heads .* d_model=16"):
        annotated.MultiHeadedAttention(3, 16)


def test_feature_41_the_model_can_be_printed():
    printed = str(annotated.build_model(CONFIG))
    assert "(0-1): 2 x DecoderLayer" in printed
    assert "(w_1): Linear(in_features=16, out_features=64" in printed
    printed = str(mingpt_style.build_model(CONFIG))
    assert "(0-1): 2 x Block" in printed
    assert "(c_attn): Linear(in_features=16, out_features=48" in printed


# Generation ----------------------------------------------------------------


def test_feature_42_draws_from_the_last_position(model):
    tokens = torch.tensor([[1, 2, 3]])
    p = log_probs(model, tokens)[0, -1].exp()
    draws = generate(
        model,
        tokens.repeat(5000, 1),
        1,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
    )[:, -1]
    counts = torch.bincount(draws, minlength=10)
    expected = 5000 * p
    # ten tokens, nine degrees of freedom: 27.9 is passed once in a thousand
    assert ((counts - expected) ** 2 / expected).sum() < 27.9


def test_feature_43_the_likeliest_of_the_last_position(model):
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    best = log_probs(model, tokens)[:, -1].argmax(-1)
    model.train()  # dropout is not on while tokens are chosen: the post's is
    for _ in range(3):
        assert generate(model, tokens, 1)[:, -1].equal(best)


def test_feature_44_the_window_is_the_last_block(model):
    tokens = torch.randint(10, (2, 30))
    full = generate(model, tokens, 4)
    cropped = generate(model, tokens[:, -12:], 4)
    assert full[:, -4:].equal(cropped[:, -4:])
    assert full[:, :30].equal(tokens)


def test_feature_45_a_fixed_number_of_new_tokens(model):
    tokens = torch.tensor([[1, 2]])
    rows = [generate(model, tokens, n)[0].tolist() for n in range(15)]
    for n, row in enumerate(rows):
        assert len(row) == 2 + n
        assert rows[-1][: len(row)] == row  # the window only grows


@pytest.mark.parametrize("count", [10, 500])
def test_feature_46_from_a_newline(style, count):
    tokenizer = load_tokenizer("char", "\n !abcdefghijklmnopqrstuvwxyz")
    config = CONFIG.replace(vocab_size=tokenizer.n_vocab)
    newline = torch.tensor([tokenizer.encode("\n")])
    assert newline.tolist() == [[0]]
    row = generate(style.build_model(config), newline, count, temperature=1.0)
    text = tokenizer.decode(row[0].tolist())
    assert len(text) == 1 + count
    assert text[0] == "\n"
    assert len(set(text)) > 3


def test_feature_47_a_batch_of_different_prompts(model):
    tokens = torch.randint(10, (5, 7))
    together = generate(model.double(), tokens, 6)
    for row, prompt in zip(together, tokens, strict=True):
        assert generate(model, prompt[None], 6)[0].equal(row)
    prompts = [[1], [2, 3, 4], [5, 6]]
    for row, prompt in zip(
        generate_rows(model, prompts, 6), prompts, strict=True
    ):
        alone = generate(model, torch.tensor([prompt]), 6)
        assert alone[0].tolist() == row


def test_feature_48_temperature_and_top_p(model):
    log_p = log_probs(model, torch.tensor([[1, 2, 3]]))[:, -1]
    entropies = []
    for temperature in (0.25, 0.5, 1.0, 2.0):
        p = Sampler(temperature).probabilities(log_p)
        entropies.append(-(p * p.log()).sum().item())
    assert entropies == sorted(entropies)
    torch.testing.assert_close(Sampler(1.0).probabilities(log_p), log_p.exp())
    kept = Sampler(1.0, top_p=0.5).probabilities(log_p) > 0
    mass = log_p.exp()[kept]
    assert mass.sum() >= 0.5
    assert mass.sum() - mass.min() < 0.5  # not one token too many


def test_feature_49_cross_entropy_over_all_positions():
    model = mingpt_style.build_model(CONFIG).eval()
    x, y = torch.randint(10, (2, 4, 12)).unbind(0)
    logits, loss = model(x, y)
    each = -logits.log_softmax(-1).gather(-1, y[..., None])
    assert each.numel() == 48
    torch.testing.assert_close(loss, each.mean())
    # on log-probabilities cross-entropy and nll are the same
    ours = annotated.build_model(CONFIG).eval().log_probs(x).flatten(0, 1)
    torch.testing.assert_close(
        F.cross_entropy(ours, y.flatten()), F.nll_loss(ours, y.flatten())
    )


# Exact figures -------------------------------------------------------------


def test_figure_01_length_and_vocabulary(shakespeare, char):
    assert (len(shakespeare), char.n_vocab) == (1115394, 65)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert char.characters == f"\n !$&',-.3:;?{letters}{letters.lower()}"


def test_figure_02_hello_world(char):
    ids = [46, 43, 50, 50, 53, 1, 61, 53, 56, 50, 42]
    assert char.encode("hello world") == ids


def test_figure_03_the_shape_of_the_data(shakespeare, char):
    data = torch.tensor(char.encode(shakespeare))
    assert data.shape == (1115394,)
    assert [len(part) for part in split_ids(data)] == [1003854, 111540]


def test_figure_04_the_first_nine_ids_and_their_lines(shakespeare, char):
    ids = char.encode(shakespeare[:9])
    assert shakespeare[:9] == "First Cit"
    assert ids == [18, 47, 56, 57, 58, 1, 15, 47, 58]
    x, y = random_batch(torch.tensor(ids), 1, 8)
    lines = [f"{x[0, : t + 1].tolist()} --> {y[0, t]}" for t in range(8)]
    assert lines[0] == "[18] --> 47"
    assert lines[4] == "[18, 47, 56, 57, 58] --> 1"
    assert lines[7] == "[18, 47, 56, 57, 58, 1, 15, 47] --> 58"


def test_figure_11_the_masks():
    five = causal_mask(5)
    assert five.int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1],
            ]
        ]
    ]
    assert slice_mask(five, 3).int().tolist() == [
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    ]


@pytest.fixture(scope="module", params=STYLES)
def gpt1(request):
    """The post's model: GPT-1's sizes, 10 tokens, 12 positions, GELU."""
    config = GPTConfig(10, 12, activation="gelu")
    return load_style(request.param).build_model(config)


def test_figure_12_shapes_and_the_refusal_of_fifteen(gpt1):
    q, k = torch.randn(2, 3, 2, 3, 8).unbind(0)  # batch 3, 2 heads
    _, weights = annotated.attention(q, k, k, slice_mask(causal_mask(5), 3))
    assert weights.shape == (3, 2, 3, 3)
    tokens = torch.randint(10, (3, 15))
    gpt1.train()  # as the post runs it: there all logits are NaN
    out = log_probs(gpt1, tokens[:, :12])
    assert out.shape == (3, 12, 10)
    assert out.isfinite().all()
    with pytest.raises(ValueError, match=r"15 tokens is longer .* 12"):
        gpt1.log_probs(tokens)


def test_figure_13_the_modules_of_gpt1(gpt1):
    blocks = (
        gpt1.decoder.layers if hasattr(gpt1, "decoder") else gpt1.transformer.h
    )
    assert len(blocks) == 12
    for block in blocks:
        shapes = {
            tuple(m.weight.shape)
            for m in block.modules()
            if isinstance(m, nn.Linear)
        }
        assert {(3072, 768), (768, 3072)} <= shapes
        assert shapes & {(768, 768), (3 * 768, 768)}
        rates = {m.p for m in block.modules() if isinstance(m, nn.Dropout)}
        assert rates == {0.1}
        gelu = [m for m in block.modules() if isinstance(m, nn.GELU)]
        assert [m.approximate for m in gelu] == ["none"]
    tables = [m for m in gpt1.modules() if isinstance(m, nn.Embedding)]
    assert tables[0].weight.shape == (10, 768)
    # eps 1e-05 is torch's own, which a GPT-2 checkpoint brings along
    school = load_style(type(gpt1).__module__.split(".")[0])
    small = school.from_gpt2(
        mingpt_style.to_gpt2(mingpt_style.build_model(CONFIG)), CONFIG
    )
    norms = [m for m in small.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 2 * CONFIG.n_layer + 1
    assert {m.eps for m in norms} == {1e-05}


def test_figure_14_a_long_time_ago(r50k_base):
    assert r50k_base.encode("A long time ago") == [32, 890, 640, 2084]
    assert r50k_base.n_vocab == 50257


def test_figure_15_she_and_her(r50k_base):
    words = ("she", "her", " she", " her")
    ids = [r50k_base.encode(word) for word in words]
    assert ids == [[7091], [372], [673], [607]]


def test_figure_16_fourteen_ids_and_their_text(r50k_base):
    ids = [
        32, 890, 640, 2084, 3556, 48241, 26430, 34350, 28146, 43264, 3556,
        6787, 45859, 13884,
    ]  # fmt: skip
    assert r50k_base.decode(ids) == (
        "A long time ago</ spaghetti Rapiddx Rav unresolved</ rail MUCHkeeper"
    )


def test_figure_17_fourteen_tokens_after_ten_new_ones():
    model = annotated.make_model(50257)
    tokens = torch.tensor([[32, 890, 640, 2084]])
    out = generate(model, tokens, 10)
    assert out.shape == (1, 14)
    assert out[:, :4].equal(tokens)
    assert generate(model, tokens, 10).equal(out)


def test_figure_18_the_defaults():
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(
            annotated.make_model
        ).parameters.items()
    }
    assert (defaults["N"], defaults["d_model"], defaults["h"]) == (6, 512, 8)
    assert (defaults["d_ff"], defaults["dropout"]) == (2048, 0.1)
    assert annotated.MultiHeadedAttention(8, 512).d_k == 64
    assert annotated.make_model(10, N=1).block_size == 5000  # max_len
    assert GPTConfig.preset("gpt2").block_size == 1024
