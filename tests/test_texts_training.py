"""What the lecture's notebook shows of training, feature by feature.

The numbers are those of the list of features and figures that
tests/test_texts.py explains. Where a listing is wrong, what is tested is the
right behaviour; the comment names the fault.
"""

import math
import re
import sys

import pytest
import torch
from strategies import STYLES
from torch import nn

import annotated
import mingpt_style
import shared.cli
from mingpt_style.heads import (
    Head,
    MultiHead,
    average_by_loop,
    average_by_matrix,
    average_by_softmax,
)
from mingpt_style.ladder import (
    RUNGS,
    Bigram,
    FullGPT,
    NormedBlock,
    OneHead,
    Positions,
    Residual,
    Thinking,
)
from shared import GPTConfig, generate, load_tokenizer
from shared.masks import causal_mask
from shared.tokenization.texts import random_batch, read_text, split_ids
from shared.training.recipe import Recipe, generator_for
from shared.training.trainer import Trainer, mean_loss

FEATURES = {5, 6, *range(10, 18), 20, *range(50, 54)}
FIGURES = {*range(5, 11), *range(19, 26)}

# The notebook's first models: 65 characters, 8 of context, 32 features.
SMALL = GPTConfig(65, 8, n_layer=1, n_head=4, n_embd=32, dropout=0.0)
# Its last one: 3 layers, 8 heads, 384 wide, context 256.
LARGE = GPTConfig(65, 256, n_layer=3, n_head=8, n_embd=384, dropout=0.2)


def test_every_number_has_a_test():
    names = [n for n in globals() if n.startswith("test_")]
    for kind, wanted in (("feature", FEATURES), ("figure", FIGURES)):
        pattern = rf"test_{kind}_(\d+)_"
        found = {int(m[1]) for n in names if (m := re.match(pattern, n))}
        assert found == wanted


@pytest.fixture(scope="module")
def notebook(sibling):
    file = sibling / "texts" / "lets-build-gpt.txt"
    if not file.is_file():
        pytest.skip("the notebook is not beside the kit")
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def post(sibling):
    file = sibling / "texts" / "gpt-from-scratch.md"
    if not file.is_file():
        pytest.skip("the post is not beside the kit")
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shakespeare(sibling):
    file = sibling / "data" / "tinyshakespeare.txt"
    if not file.is_file():
        pytest.skip("Tiny Shakespeare is not beside the kit")
    return read_text(file)


def printed(text, start, *shape):
    """The numbers of a tensor printed from `start` on."""
    numbers = re.findall(
        r"-?(?:inf|\d+\.(?:\d+(?:e[+-]\d+)?)?)", text[text.index(start) :]
    )
    wanted = math.prod(shape)
    return torch.tensor([float(n) for n in numbers[:wanted]]).view(shape)


def count(module):
    return sum(p.numel() for p in module.parameters())


def earlier_moves(module, x):
    """How far earlier outputs move when the last input changes."""
    other = x.clone()
    other[:, -1] = torch.randn_like(other[:, -1])
    with torch.no_grad():
        return (module(x) - module(other))[:, :-1].abs().max().item()


# Batches -------------------------------------------------------------------


def test_feature_05_random_windows_and_their_targets():
    data = torch.arange(20)
    generator = torch.Generator().manual_seed(0)
    x, y = random_batch(data, 4000, 8, generator)
    assert x.shape == y.shape == (4000, 8)
    assert y.equal(x + 1)
    assert sorted(set(x[:, 0].tolist())) == list(range(12))  # every start
    x, _ = random_batch(data, 3, 5)
    assert x.shape == (3, 5)  # sizes are settings, not globals


def test_feature_06_a_part_to_learn_from_and_one_to_test_on():
    # D3-09: get_batch(split) is called, and takes no argument;
    # D3-11: and there is no split
    train, val = split_ids(torch.arange(1000))
    assert (len(train), len(val)) == (900, 100)
    assert torch.cat([train, val]).equal(torch.arange(1000))
    model = mingpt_style.build_model(SMALL.replace(vocab_size=1000))
    trainer = Trainer(model, train, val, Recipe(batch_size=2, eval_batches=2))
    for name, part in (("train", train), ("val", val)):
        x, y = trainer._batch(name, 1)
        assert set(x.flatten().tolist()) <= set(part.tolist())
        # D3-11: windows are as long as the model's context, not 8 of 256
        assert x.shape == y.shape == (2, model.block_size)


# Models --------------------------------------------------------------------


def test_feature_10_a_bigram_table():
    model = Bigram(SMALL)
    tokens = torch.tensor([[1, 2, 1]])
    logits, loss = model(tokens, torch.tensor([[2, 1, 3]]))
    assert logits.equal(model.table.weight[tokens])
    want = -model.table.weight.log_softmax(-1)[[1, 2, 1], [2, 1, 3]].mean()
    torch.testing.assert_close(loss, want)
    assert generate(model, tokens, 4, temperature=1.0).shape == (1, 7)
    # D3-18: the vocabulary is the model's, not a global
    other = Bigram(SMALL.replace(vocab_size=130))
    assert other(tokens)[0].shape == (1, 3, 130)


def test_feature_11_tokens_and_positions_and_a_head():
    model = Positions(SMALL)
    tokens = torch.randint(65, (2, 8))
    features = model.wte(tokens) + model.wpe(torch.arange(8))
    torch.testing.assert_close(model(tokens)[0], model.lm_head(features))
    # D3-01: more than 8 new tokens crash the notebook's
    assert generate(model, tokens[:, :1], 50).shape == (2, 51)


def test_feature_12_and_one_head_of_attention():
    model = OneHead(SMALL)  # D3-02: the default sizes do not fit each other
    tokens = torch.randint(65, (4, 8))
    assert model(tokens)[0].shape == (4, 8, 65)
    assert generate(model, tokens[:, :1], 50).shape == (4, 51)


def test_feature_13_averaging_three_ways():
    # D3-12: with allclose's own tolerance they differ in 34 of 1000 seeds
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 8, 2, generator=generator)
        loop = average_by_loop(x)
        assert torch.allclose(average_by_matrix(x), loop, atol=1e-6)
        assert torch.allclose(average_by_softmax(x), loop, atol=1e-6)


def test_feature_14_a_single_head_with_its_weights_shown():
    x = torch.randn(4, 8, 2)
    q, k, v = (nn.Linear(2, 16, bias=False)(x) for _ in range(3))
    out, weights = annotated.attention(q, k, v, causal_mask(8)[0])
    assert weights.shape == (4, 8, 8)
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(
        ~causal_mask(8)[0], float("-inf")
    )
    torch.testing.assert_close(weights, scores.softmax(-1))
    assert not weights[0].allclose(weights[1])  # not uniform any more
    torch.testing.assert_close(out, weights @ v)


def test_feature_15_why_the_root_of_the_heads_size():
    q, k = torch.randn(2, 200, 8, 16).unbind(0)
    scores = q @ k.transpose(-2, -1)
    assert 14 < scores.var() < 18
    # D3-24: by its square root, not "by that amount"
    assert 0.9 < (scores / 16**0.5).var() < 1.1
    assert (scores / 16).var() < 0.1


def test_feature_16_a_head_that_takes_shorter_windows():
    head = Head(n_embd=384, head_size=48)
    x = torch.randn(2, 64, 384)
    with torch.no_grad():
        torch.testing.assert_close(
            head(x)[:, :5], head(x[:, :5]), atol=1e-5, rtol=1e-4
        )
        q, k = head.query(x), head.key(x)
        v = head.value(x)
        want, _ = annotated.attention(q, k, v, causal_mask(64)[0])
        # D3-04: the notebook divides by the root of 384, not of 48
        torch.testing.assert_close(head(x), want)
    assert earlier_moves(head, x) == 0
    # D3-03, D3-14: one Head, named sizes, and no mask in the checkpoint
    assert set(head.state_dict()) == {
        "query.weight", "key.weight", "value.weight",
    }  # fmt: skip


@pytest.mark.parametrize("project", [False, True])
def test_feature_17_heads_side_by_side(project):
    module = MultiHead(SMALL, project)
    x = torch.randn(4, 8, 32)
    joined = torch.cat([head(x) for head in module.heads], dim=-1)
    want = module.c_proj(joined) if project else joined
    torch.testing.assert_close(module(x), want)
    # D3-06: the one "in one go" that was offered instead has no mask
    assert earlier_moves(module, x) == 0


def test_feature_20_a_block_without_and_with_the_stream():
    x = torch.randn(2, 8, 32)
    plain, stream, normed = (
        Thinking(SMALL), Residual(SMALL), NormedBlock(SMALL),
    )  # fmt: skip
    torch.testing.assert_close(plain.body(x), plain.mlp(plain.attn(x)))
    for part in (stream.attn.c_proj, stream.mlp[2], normed.attn.c_proj,
                 normed.mlp[2]):  # fmt: skip
        nn.init.zeros_(part.weight)
        nn.init.zeros_(part.bias)
    # with branches that say nothing the stream passes untouched
    assert stream.body(x).equal(x)
    assert normed(x).equal(x)
    assert not plain.body(x).allclose(x)
    # D3-05: the norm looks along the features, not along time
    block = NormedBlock(SMALL)
    assert earlier_moves(block, x) == 0
    for module in (block, annotated.LayerNorm(32), nn.LayerNorm(32)):
        with torch.no_grad():
            assert module(x[:, :1]).isfinite().all()  # a single token
    assert len(list(annotated.LayerNorm(32).parameters())) == 2


# Training ------------------------------------------------------------------


def small_trainer(style, **settings):
    ids = torch.arange(2000) ** 2 % 65
    torch.manual_seed(0)
    model = STYLES[style].build_model(SMALL.replace(dropout=0.2))
    return Trainer(model, *split_ids(ids), Recipe(batch_size=8, **settings))


@pytest.mark.parametrize("style", STYLES)
def test_feature_50_the_mean_of_many_batches(style):
    trainer = small_trainer(style, eval_batches=200)
    trainer.model.eval()
    drawing = generator_for("eval", 0, "val")
    with torch.no_grad():
        each = [
            mean_loss(trainer.model, *random_batch(val, 8, 8, drawing))
            for val in [trainer.texts["val"]] * 200
        ]
    losses = trainer.estimate_losses()
    assert losses.keys() == {"train", "val"}  # D3-10: a float, then indexed
    assert not trainer.model.training  # D3-10: and left in train mode
    assert losses["val"] == pytest.approx(float(torch.stack(each).mean()))
    assert all(abs(loss - math.log(65)) < 1 for loss in losses.values())


@pytest.mark.parametrize("style", STYLES)
def test_feature_51_train_and_look_now_and_then(style):
    trainer = small_trainer(
        style, steps=100, eval_interval=10, eval_batches=5, lr=1e-2
    )
    records = [trainer.take_step() for _ in range(100)]
    seen = [r for r in records if r.val_loss is not None]
    assert [r.step for r in seen] == list(range(10, 101, 10))
    assert seen[-1].train_estimate < seen[0].train_estimate - 0.3
    assert isinstance(trainer.optimizer, torch.optim.AdamW)


@pytest.mark.parametrize("style", STYLES)
def test_feature_52_every_position_is_taught_by_the_true_past(style):
    trainer = small_trainer(style)
    x, y = trainer._batch("train", 1)
    trainer.model.eval()
    log_p = trainer.model.log_probs(x)
    # teacher forcing: each prefix's prediction, had it been read alone
    for t in range(1, 9):
        alone = trainer.model.log_probs(x[:, :t])[:, -1]
        torch.testing.assert_close(alone, log_p[:, t - 1])
    loss = -log_p.gather(-1, y[..., None]).mean()
    loss.backward()
    # D3-11: every position learns, not the first 8 of 256
    if style == "mingpt_style":
        rows = trainer.model.transformer.wpe.weight.grad.abs().sum(1)
        assert (rows > 0).all()


def test_feature_53_a_count_with_its_commas(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("".join(map(chr, range(48, 48 + 65))) * 3)
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", [
        "gpt-duet", "train", f"--file={text}", "--n-layer=3", "--n-head=8",
        "--n-embd=32", "--block-size=8", "--steps=1", "--eval-batches=1",
        f"--out={out}",
    ])  # fmt: skip
    with pytest.raises(SystemExit) as exit_:
        shared.cli.main()
    assert not exit_.value.code
    config = SMALL.replace(n_layer=3, n_head=8)
    parameters = count(mingpt_style.build_model(config))
    assert parameters > 1000
    assert f" {parameters:,} parameters, " in capsys.readouterr().err
    # the small models of the notebook, by their sizes
    assert [count(RUNGS[name](SMALL)) for name in list(RUNGS)[:2]] == [
        4225, 4481,
    ]  # fmt: skip
    assert count(OneHead(SMALL.replace(n_embd=16, n_head=1))) == 3041
    assert count(MultiHead(SMALL, project=False)) == 3072


# Exact figures -------------------------------------------------------------


def test_figure_05_the_logits_of_the_bigram():
    x = torch.randint(65, (4, 8))
    assert Bigram(SMALL)(x)[0].shape == (4, 8, 65)


def test_figure_06_averages_as_a_matrix(notebook):
    x = torch.randn(4, 8, 2)
    assert x.shape == average_by_matrix(x).shape == (4, 8, 2)
    matrix = average_by_matrix(torch.eye(8)[None])[0]
    for t in range(8):
        row = [1 / (t + 1)] * (t + 1) + [0] * (7 - t)
        torch.testing.assert_close(matrix[t], torch.tensor(row))
    assert average_by_softmax(torch.eye(8)[None])[0].allclose(matrix)
    # the scores that are shown: 0 for the past, -inf for the future
    shown = printed(notebook, "[[0., -inf,", 8, 8)
    assert shown.isneginf().equal(~causal_mask(8)[0, 0])
    torch.testing.assert_close(shown.softmax(-1), matrix)


def test_figure_07_weights_and_values_of_one_head():
    x = torch.randn(4, 8, 2)
    assert Head(2, 16)(x).shape == (4, 8, 16)
    head = Head(2, 16)
    _, weights = annotated.attention(
        head.query(x), head.key(x), head.value(x), causal_mask(8)[0]
    )
    assert weights.shape == (4, 8, 8)


def test_figure_08_shapes_that_stay():
    assert Head(2, 2)(torch.randn(4, 8, 2)).shape == (4, 8, 2)
    heads = MultiHead(SMALL, project=False)
    assert heads(torch.randn(4, 8, 32)).shape == (4, 8, 32)
    with torch.no_grad():  # D3-33: with a graph it keeps 469 MB
        out = NormedBlock(LARGE)(torch.randn(64, 256, 384))
    assert out.shape == (64, 256, 384)


def test_figure_09_parameters_of_the_notebooks_gpt():
    model = FullGPT(LARGE)
    assert count(model) == 5_468_993
    # heads without bias, their concatenation projected with one, a feed
    # forward network with two, two norms; and a read-out with a bias
    block = 3 * 384 * 384 + (384 + 1) * 384
    block += (384 + 1) * 1536 + (1536 + 1) * 384 + 4 * 384
    assert count(model.blocks[0]) == block == 1_773_312
    assert count(model.wte) == 65 * 384 == 24_960
    assert count(model.wpe) == 256 * 384 == 98_304
    assert count(model.ln_f) == 768
    assert count(model.lm_head) == 65 * 384 + 65 == 25_025
    for heads in (1, 16):
        assert count(FullGPT(LARGE.replace(n_head=heads))) == 5_468_993
    # the school's own GPT has biased projections and an unbiased read-out
    own = count(mingpt_style.build_model(LARGE))
    assert own == 5_468_993 + 3 * 3 * 384 - 65


@pytest.mark.parametrize(("new", "length"), [(10, 11), (500, 501)])
def test_figure_10_lengths_of_what_is_written(new, length):
    tokenizer = load_tokenizer("char", "\nabc")
    model = FullGPT(SMALL.replace(vocab_size=4))
    start = torch.tensor([tokenizer.encode("\n")])
    row = generate(model, start, new, temperature=1.0)[0]
    text = tokenizer.decode(row.tolist())
    assert len(text) == length
    assert text[0] == "\n"


# Consistent figures --------------------------------------------------------


def test_figure_19_the_softmax_the_post_shows(post):
    scores = printed(post, "[[[[-0.6319,", 3, 2, 3, 3)
    shown = printed(post, "[[[[1.0000, 0.0000, 0.0000],", 3, 2, 3, 3)
    visible = causal_mask(3)
    assert scores.isinf().equal((~visible).expand(3, 2, 3, 3))
    assert (scores.softmax(-1) - shown).abs().max() < 6e-5
    assert (shown.sum(-1) - 1).abs().max() < 2e-4
    # and the kit's mask hides what the post's hides
    again = scores.masked_fill(~visible, float("-inf"))
    assert again.equal(scores)


def test_figure_20_the_running_mean_that_is_shown(notebook):
    x = printed(notebook, "[[-0.1816,  0.1048],", 1, 8, 2)
    after = notebook[notebook.index("0.4340,  0.5938") :]
    shown = printed(after, "[[-0.1816,", 1, 8, 2)
    for average in (average_by_loop, average_by_matrix, average_by_softmax):
        assert (average(x) - shown).abs().max() < 6e-5


def test_figure_21_the_weights_that_are_shown(notebook):
    shown = printed(notebook, "[[[1.0000e+00,", 8, 8)
    assert (shown.sum(-1) - 1).abs().max() < 2e-5
    assert shown.triu(1).count_nonzero() == 0
    # the same holds for the kit's own
    x = torch.randn(1, 8, 2)
    head = Head(2, 16)
    _, weights = annotated.attention(
        head.query(x), head.key(x), head.value(x), causal_mask(8)[0]
    )
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 8))
    assert weights.triu(1).count_nonzero() == 0


def test_figure_22_a_variance_divided_by_sixteen(notebook):
    shown = [
        float(n) for n in re.findall(r"Variance of .*: (\d+\.\d+)", notebook)
    ]
    assert shown[2] / shown[3] == pytest.approx(16, rel=1e-6)
    # 13.19 is within the spread of what 4 x 8 x 16 draws give
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 500, 4, 8, 16, generator=generator).unbind(0)
    variances = (q @ k.transpose(-2, -1)).flatten(1).var(1)
    assert abs(variances.mean() - 16.11) < 0.4
    assert abs(shown[2] - variances.mean()) < 3 * variances.std()


def test_figure_23_the_first_loss_of_the_bigram(notebook):
    shown = float(re.search(r"\n(4\.48\d+)\n", notebook)[1])
    x, y = torch.randint(65, (2, 4, 8)).unbind(0)
    losses = torch.stack([Bigram(SMALL)(x, y)[1].detach() for _ in range(300)])
    # normal scores cost half a nat beside not knowing anything
    assert abs(losses.mean() - (math.log(65) + 0.5)) < 0.1
    assert abs(shown - losses.mean()) < 3 * losses.std()


def test_figure_24_four_windows_of_the_text(notebook, shakespeare):
    shown = notebook.split("tensor([[41", 1)[1].split("-->")[0]
    rows = re.findall(r"\[((?:\d+, *){7}\d+)\]", "[[41" + shown)
    windows = [list(map(int, row.split(","))) for row in rows]
    x, y = windows[:4], windows[4:]
    tokenizer = load_tokenizer("char", shakespeare)
    for here, there in zip(x, y, strict=True):
        assert there[:-1] == here[1:]
        assert tokenizer.decode([*here, there[-1]]) in shakespeare
    shown = [tokenizer.decode([*x[i], y[i][-1]]) for i in range(4)]
    assert [
        (shakespeare.count(w), shakespeare.index(w)) for w in shown[:3]
    ] == [(1, 486268), (1, 404717), (1, 322729)]
    assert (shown[3], shakespeare.count(shown[3])) == ("thousand ", 71)


def test_figure_25_greedy_repeats_itself_in_eval_mode():
    # nine distinct ids of ten, as shown, come from a model in train mode
    config = GPTConfig(2000, 64, n_layer=3, n_head=4, n_embd=64, dropout=0.1)
    distinct = {"eval": [], "train": []}
    for seed in range(5):
        torch.manual_seed(seed)
        model = annotated.make_model(
            config.vocab_size, N=3, d_model=64, d_ff=256, h=4, max_len=64
        )
        tokens = torch.tensor([[32, 890, 640, 1084]])
        new = generate(model, tokens, 10)[0, 4:]
        distinct["eval"].append(len(set(new.tolist())))
        model.train()
        for _ in range(10):
            best = model.next_log_probs(tokens).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], dim=1)
        distinct["train"].append(len(set(tokens[0, 4:].tolist())))
    assert max(distinct["eval"]) <= 6
    assert sum(distinct["train"]) > sum(distinct["eval"])
